"""`baton doctor` asks a real API server for definitions and rights.

What it says of every answer is in tests/cli/doctor/test_broken_clusters.py, with a stand-in.
"""

from __future__ import annotations

from pathlib import Path

from baton_cli.doctor.examination import examine
from baton_cli.doctor.host import Host
from baton_cli.doctor.options import DoctorOptions
from baton_operator.api.crd import crd, scaler_crd
from baton_operator.inspection import RIGHTS
from baton_operator.kube.permissions import PermissionRule
from tests.cli.doctor.setups import PATIENCE
from tests.cluster.installed import definition
from tests.cluster.machine.client import Kubernetes
from tests.cluster.test_operator_rights import account, grant

FIELD = "rollout"  # no rule of the definition names it


def problems(kubeconfig: Path, namespace: str) -> list[str]:
    host = Host(environ={"KUBECONFIG": str(kubeconfig)}, patience=PATIENCE)
    findings = examine(DoctorOptions(kubernetes=True, namespace=namespace, port=0), host)
    return [
        each.found
        for each in findings
        if each.check in ("cluster", "clock") and each.severity in ("warning", "error")
    ]


def test_doctor_finds_definitions_that_are_missing_or_old(
    control_plane: Kubernetes, namespace: str
) -> None:
    def about_definitions() -> list[str]:
        found = problems(control_plane.kubeconfig, namespace)
        return [text for text in found if text.startswith("the CRD ")]

    assert [text.endswith("is not installed") for text in about_definitions()] == [True, True]
    older = crd()
    [version] = older["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][FIELD]
    with definition(control_plane, scaler_crd()):
        with definition(control_plane, older):
            [old] = about_definitions()
            assert f"it lacks spec.{FIELD}, " in old
        with definition(control_plane, crd()):
            assert about_definitions() == []


def test_doctor_finds_rights_that_an_account_lacks(
    plane: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    def about_rights() -> list[str]:
        found = problems(config, namespace)
        return [text for text in found if "you may not" in text]

    config = account(plane, namespace, tmp_path)
    [lacks] = about_rights()
    assert "create inferencepools.baton.dev" in lacks
    assert lacks.startswith(f"in namespace {namespace} ")
    rules = [PermissionRule(kind.group, kind.plural, (verb,)) for kind, verb in RIGHTS]
    grant(plane, namespace, rules, everywhere=False)
    assert about_rights() == []
