"""The control plane is a real one: it validates, keeps its data, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.installed import definition
from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.cluster.machine.control_plane import ControlPlane
from tests.cluster.machine.processes import marked
from tests.support.needs import needs

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "things.test.example"},
    "spec": {
        "group": "test.example",
        "scope": "Namespaced",
        "names": {"plural": "things", "singular": "thing", "kind": "Thing"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "size": {
                                "type": "integer",
                                "x-kubernetes-validations": [
                                    {"rule": "self % 2 == 0", "message": "write an even number"}
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def thing(size: int) -> str:
    metadata = {"name": "one"}
    return json.dumps(
        {"apiVersion": "test.example/v1", "kind": "Thing", "metadata": metadata, "size": size}
    )


def test_an_object_that_breaks_a_validation_rule_is_refused_with_its_message(
    control_plane: Kubernetes, namespace: str
) -> None:
    with definition(control_plane, CRD):
        control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=thing(2))
        with pytest.raises(CommandFailed, match="write an even number"):
            control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=thing(3))


def test_controllers_turn_a_deployment_into_pods(control_plane: Kubernetes, namespace: str) -> None:
    args = ("create", "deployment", "web", "--image=web.test/none:1", "--replicas=2")
    control_plane.kubectl(*args, "-n", namespace)
    condition = "--for=jsonpath={.status.replicas}=2"
    control_plane.kubectl("wait", condition, "deployment/web", "-n", namespace, "--timeout=180s")


def test_helm_works_with_the_version_that_the_server_reports(control_plane: Kubernetes) -> None:
    needs("own_cluster")  # other clusters may have other versions
    version = json.loads(control_plane.kubectl("get", "--raw", "/version"))
    assert (version["major"], version["minor"]) == ("1", "36")
    assert control_plane.helm("list", "--all-namespaces").startswith("NAME")


def test_a_restarted_api_server_keeps_its_data(
    fresh_control_plane: Kubernetes,
) -> None:
    needs("own_cluster")
    fresh_control_plane.kubectl("create", "configmap", "kept", "--from-literal=key=value")
    fresh_control_plane.stop_apiserver()
    with pytest.raises(CommandFailed, match="refused"):
        fresh_control_plane.kubectl("get", "configmap", "kept")
    fresh_control_plane.start_apiserver()
    assert "value" in fresh_control_plane.kubectl("get", "configmap", "kept", "-o", "json")


def test_a_closed_control_plane_leaves_neither_process_nor_file(
    programs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "control-plane"
    with ControlPlane(programs, folder):
        assert len(marked(str(folder))) == 4
    assert marked(str(folder)) == []
    assert not folder.exists()
