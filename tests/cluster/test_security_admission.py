"""A real API server admits the operator's manifests, even with the Pod Security Standards' profile
`restricted` enforced, and an edit leaves no old fields behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from baton_operator.builders import build_pool
from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.kubernetes.manifests import RESTRICTED, sample_pool, templates

ENFORCED = {
    f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")
}
APPLY = ("apply", "--server-side", "--field-manager=baton-operator", "--warnings-as-errors")


# A router with every kind of field, which the edits remove.
FULL_ROUTER = {
    "replicas": 2,
    "service": {"type": "LoadBalancer", "port": 8000, "annotations": {"example.com/a": "b"}},
    "resources": {"limits": {"memory": "1Gi"}},
    "extraArgs": ["--request-timeout=60"],
    "podTemplate": {
        "metadata": {"labels": {"example.com/c": "d"}},
        "spec": {
            "nodeSelector": {"example.com/disk": "fast"},
            "containers": [
                {
                    "name": "router",
                    "env": [{"name": "LC_ALL", "value": "C"}],
                    "ports": [{"name": "more", "containerPort": 8001, "protocol": "TCP"}],
                }
            ],
        },
    },
}


def documents(name: str, namespace: str, **spec: Any) -> list[dict[str, Any]]:
    """The sample's manifests for the test's namespace. They have no owner references, because
    Kubernetes would delete objects whose owner does not exist. HTTPRoutes are left out, because
    Kubernetes alone does not know them."""
    objects = [one for one in build_pool(sample_pool(name, **spec)) if one["kind"] != "HTTPRoute"]
    for manifest in objects:
        manifest["metadata"]["namespace"] = namespace
        del manifest["metadata"]["ownerReferences"]
    return objects


def pods(manifests: list[dict[str, Any]], namespace: str) -> list[dict[str, Any]]:
    """One pod of each workload, as its controller would create it."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": template["metadata"] | {"name": name, "namespace": namespace},
            "spec": template["spec"],
        }
        for name, template in templates(manifests).items()
    ]


@pytest.fixture(scope="module")
def enforced(control_plane: Kubernetes) -> Iterator[str]:
    """A namespace that refuses pods outside `restricted`."""
    name = control_plane.new_namespace(**ENFORCED)
    yield name
    control_plane.delete_namespace(name)


@pytest.mark.parametrize("name", RESTRICTED)
def test_the_manifests_and_their_pods_pass_the_profile_restricted_without_a_warning(
    control_plane: Kubernetes, enforced: str, name: str
) -> None:
    manifests = documents(name, enforced)
    everything = [*manifests, *pods(manifests, enforced)]
    text = yaml.safe_dump_all(everything)
    output = control_plane.kubectl(*APPLY, "--dry-run=server", "-f", "-", stdin=text)
    assert output.count("serverside-applied") == len(everything)


def test_restricted_refuses_a_cache_on_the_host(control_plane: Kubernetes, enforced: str) -> None:
    text = yaml.safe_dump_all(pods(documents("host", enforced), enforced))
    with pytest.raises(CommandFailed) as caught:
        control_plane.kubectl(*APPLY, "--dry-run=server", "-f", "-", stdin=text)
    assert "restricted volume types" in caught.value.error
    assert "runAsUser=0" in caught.value.error


def applied(cluster: Kubernetes, namespace: str, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Apply the pool's manifests; return the stored objects without the server's own choices."""
    text = yaml.safe_dump_all(documents("claim", namespace, **spec))
    output = cluster.kubectl(*APPLY, "-f", "-", "-o", "json", stdin=text)
    return {
        f"{item['kind']} {item['metadata']['name']}": without_chosen_fields(item)
        for item in json.loads(output)["items"]
    }


def without_chosen_fields(body: dict[str, Any]) -> dict[str, Any]:
    spec, metadata = body.get("spec", {}), body["metadata"]
    if body["kind"] == "Service":
        spec = {key: value for key, value in spec.items() if key not in ("clusterIP", "clusterIPs")}
        for port in spec["ports"]:
            port.pop("nodePort", None)
    annotations = {
        key: value
        for key, value in metadata.get("annotations", {}).items()
        if not key.startswith("deployment.kubernetes.io/")
    }
    return {"spec": spec, "labels": metadata["labels"], "annotations": annotations}


EDITS: dict[str, dict[str, Any]] = {
    "fields left out": {"router": {}, "kvStore": {}, "networkPolicy": {}},
    "fields changed": {
        "router": {"service": {"type": "NodePort", "port": 80}, "extraArgs": ["--keepalive=5"]},
        "kvStore": {"managed": {"memory": "256Mi", "dataInstances": 2}},
        "networkPolicy": {"clients": [{"podSelector": {}}]},
    },
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_leaves_no_old_fields(
    control_plane: Kubernetes, namespace: str, edit: dict[str, Any]
) -> None:
    before = applied(control_plane, namespace, {"router": FULL_ROUTER})
    after = applied(control_plane, namespace, edit)
    changed = {name.partition(" ")[0] for name in before if before[name] != after.get(name)}
    assert changed >= {"Deployment", "Service", "NetworkPolicy"}
    control_plane.kubectl("delete", "all,networkpolicy", "--all", "-n", namespace)
    assert applied(control_plane, namespace, edit) == after
