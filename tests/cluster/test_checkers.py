"""Findings of kube-score, trivy and checkov in the shipped files, each accepted with a reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from baton_operator.api.pool import read_pool
from baton_operator.builders import build_pool
from tests.cluster.machine.checkers import Finding, built_checkers, checkov, kube_score, trivy
from tests.cluster.machine.client import Kubernetes
from tests.support.kubernetes.chart import MONITORING, SPREAD, Manifest, manifests, set_words
from tests.support.kubernetes.documents import POOLS, ROOT
from tests.support.kubernetes.manifests import CREDENTIALS, INSTALLATION
from tests.support.needs import needs

CHECKERS = {"kube-score": kube_score, "trivy": trivy, "checkov": checkov}
# Values for renderings of the chart: none, and all that add objects or fields.
CHARTS: dict[str, dict[str, Any]] = {
    "chart": {},
    "chart-full": {
        "operator.replicas": 2,
        "operator.priorityClassName": "system-cluster-critical",
        "operator.topologySpreadConstraints": [SPREAD],
        "operator.serviceAccountAnnotations": {"cloud.example/role": "a"},
        "networkPolicy.monitoring": [MONITORING],
        "serviceMonitor.enabled": True,
        "serviceMonitor.authorization.secretName": "admins",
        "dashboards.enabled": True,
        "samplePool.enabled": True,
    },
    "chart-namespaces": {"watchNamespaces": ["blue"]},
}
# A bad manifest, and the findings that each checker must have for it.
BAD_FILE = "bad/Pod-bad"
BAD_CHECKS = {
    "kube-score": {"container-security-context-privileged: The container is privileged"},
    "trivy": {"KSV-0017"},
    "checkov": {"CKV_K8S_16"},
}
BAD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "bad", "namespace": "bad"},
    "spec": {
        "hostNetwork": True,
        "containers": [
            {"name": "bad", "image": "bad:latest", "securityContext": {"privileged": True}}
        ],
    },
}


class Accepted(NamedTuple):
    """Findings that are accepted, by shell patterns of their checks and files."""

    reason: str
    files: tuple[str, ...]
    checks: dict[str, tuple[str, ...]]


OPERATOR = ("chart*/Deployment-baton-operator",)
ONE_OPERATOR = ("chart/Deployment-baton-operator", "chart-namespaces/Deployment-baton-operator")
REDIS = ("*/Deployment-*-kv-index", "*/Deployment-*-kv-data-?")
NODES = ("*/Deployment-*-prefill-*", "*/Deployment-*-decode-*")
ROUTERS = ("*/Deployment-*-router",)
PODS = (*OPERATOR, *REDIS, *NODES, *ROUTERS)
IMAGES = ("operator", "router", "node")
ACCEPTED = (
    Accepted(
        "A CPU limit throttles a container even on an idle machine, so streams stutter. CPU "
        "requests share a busy machine fairly.",
        PODS,
        {
            "kube-score": ("container-resources: CPU limit is not set",),
            "trivy": ("KSV-0011",),
            "checkov": ("CKV_K8S_11",),
        },
    ),
    Accepted(
        "A router that is killed for its memory breaks its clients' streams. A node's memory "
        "depends on its model, so a pool's `resources` set it; a simulated node needs little.",
        (*ROUTERS, "hello/Deployment-hello-prefill-*", "hello/Deployment-hello-decode-*"),
        {
            "kube-score": ("container-resources: Memory limit is not set",),
            "trivy": ("KSV-0018",),
            "checkov": ("CKV_K8S_13",),
        },
    ),
    Accepted(
        "Tags are versions, which are never pushed twice. With policy Always no pod starts while "
        "the registry is down. The value images.pullPolicy changes the policy.",
        PODS,
        {
            "kube-score": ("container-image-pull-policy: ImagePullPolicy is not set to Always",),
            "checkov": ("CKV_K8S_15",),
        },
    ),
    Accepted(
        "Users build the images and name their registry; a name with a digest is used unchanged.",
        PODS,
        {"trivy": ("KSV-0125",), "checkov": ("CKV_K8S_43",)},
    ),
    Accepted(
        "The image sets user 65532. OpenShift gives each namespace its own user ids and refuses "
        "others, and runAsNonRoot excludes root everywhere.",
        OPERATOR,
        {
            "kube-score": ("container-security-context-user-group-id: *low * ID",),
            "trivy": ("KSV-0020", "KSV-0021"),
            "checkov": ("CKV_K8S_40",),
        },
    ),
    Accepted(
        "The operator needs the API server. It has its own account, and other pods that use this "
        "account get no token.",
        OPERATOR,
        {"checkov": ("CKV_K8S_38",)},
    ),
    Accepted(
        "A pool consists of these objects. docs/security.md explains each right, and what all "
        "rights together allow.",
        ("chart*/ClusterRole-baton-operator", "chart*/Role-baton-operator"),
        {"trivy": ("KSV-0041", "KSV-0048", "KSV-0056", "KSV-0113")},
    ),
    Accepted(
        "The operator serves no requests, and Redis listens only once it can answer, so neither is "
        "ever alive but not ready. A startup probe gives them five minutes.",
        (*OPERATOR, *REDIS),
        {"kube-score": ("pod-probes-identical: *",)},
    ),
    Accepted(
        "Pools serve without an operator, and operator.replicas allows more than one.",
        ONE_OPERATOR,
        {"kube-score": ("deployment-replicas: *",)},
    ),
    Accepted(
        "A pool's router.replicas is 1 by default, so the smallest pool fits on a laptop.",
        ROUTERS,
        {"kube-score": ("deployment-replicas: *",)},
    ),
    Accepted(
        "Redis is a cache here. A second server of the same name would hold other chunks. If one "
        "is lost, pools recompute its chunks.",
        REDIS,
        {"kube-score": ("deployment-replicas: *", "deployment-strategy: *")},
    ),
    Accepted(
        "A single operator holds no lease, so it ends before its successor starts.",
        ONE_OPERATOR,
        {"kube-score": ("deployment-strategy: *",)},
    ),
    Accepted(
        "Egress is the cluster's concern: the addresses of hubs, DNS, the API server, an external "
        "Redis and a mesh's sidecars are not known beforehand.",
        PODS,
        {"kube-score": ("pod-networkpolicy: The pod does not have a matching egress *",)},
    ),
    Accepted(
        "A user who can read a container's environment can read its files too. Baton's processes "
        "read these variables once and log none.",
        (*NODES, *ROUTERS),
        {"checkov": ("CKV_K8S_35",)},
    ),
    Accepted(
        "Kubernetes ignores HEALTHCHECK and uses probes, on ports that a pod's flags choose.",
        IMAGES,
        {"trivy": ("DS-0026",), "checkov": ("CKV_DOCKER_2",)},
    ),
    Accepted(
        "ARG BASE names the base image by tag and digest; checkov does not read it.",
        IMAGES,
        {"checkov": ("CKV_DOCKER_7",)},
    ),
)


@pytest.fixture(scope="module")
def checkers() -> Path:
    needs("control_plane")
    folder = built_checkers()
    assert folder is not None, "kube-score, trivy and checkov are missing; do: make cluster-tools"
    return folder


@pytest.fixture(scope="module")
def shipped(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Dockerfiles, and with a folder for each rendering of the chart, each pool
    of the documents and the bad manifest. It has a file for each object."""
    folder = tmp_path_factory.mktemp("shipped")
    helm = Kubernetes(folder / "none", programs, tmp_path_factory.mktemp("state"))
    for name, values in CHARTS.items():
        write(folder / name, manifests(helm, *set_words(values), namespace=name))
    for path in POOLS:
        pool = yaml.safe_load(path.read_text())
        pool["metadata"] |= {"namespace": path.stem, "uid": "1"}
        installation = msgspec.structs.replace(INSTALLATION, pull_policy="IfNotPresent")
        write(folder / path.stem, build_pool(read_pool(pool, installation, CREDENTIALS)))
    write(folder / "bad", [BAD])
    for room in ("operator", "router", "node"):
        shutil.copy(ROOT / room / "Dockerfile", folder / f"{room}.Dockerfile")
    return folder


def write(folder: Path, objects: Iterable[Manifest]) -> None:
    folder.mkdir()
    for one in objects:
        path = folder / f"{one['kind']}-{one['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump(one))


@pytest.fixture(scope="module")
def findings(checkers: Path, shipped: Path) -> dict[str, list[Finding]]:
    with ThreadPoolExecutor() as pool:
        results = {name: pool.submit(check, checkers, shipped) for name, check in CHECKERS.items()}
        return {name: one.result() for name, one in results.items()}


def matches(row: Accepted, checker: str, finding: Finding) -> bool:
    by_check = any(fnmatchcase(finding.check, one) for one in row.checks.get(checker, ()))
    return by_check and any(fnmatchcase(finding.file, file) for file in row.files)


@pytest.mark.parametrize("checker", CHECKERS)
def test_every_finding_of_a_checker_is_accepted_with_a_reason(
    findings: dict[str, list[Finding]], checker: str
) -> None:
    assert [
        finding
        for finding in findings[checker]
        if finding.file != BAD_FILE and not any(matches(row, checker, finding) for row in ACCEPTED)
    ] == []


def test_every_accepted_finding_still_occurs(findings: dict[str, list[Finding]]) -> None:
    """Each check and each file of a row must still match a finding."""
    for row in ACCEPTED:
        narrow = [
            row._replace(checks={checker: (check,)}, files=row.files)
            for checker, checks in row.checks.items()
            for check in checks
        ]
        narrow += [row._replace(files=(file,)) for file in row.files]
        for one in narrow:
            assert any(
                matches(one, checker, finding)
                for checker in CHECKERS
                for finding in findings[checker]
            ), one


@pytest.mark.parametrize("checker", CHECKERS)
def test_each_checker_finds_the_bad_manifest(
    findings: dict[str, list[Finding]], checker: str
) -> None:
    checks = {finding.check for finding in findings[checker] if finding.file == BAD_FILE}
    assert checks >= BAD_CHECKS[checker]
