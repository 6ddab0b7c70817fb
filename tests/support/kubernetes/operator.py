"""Baton's operator in a cluster, as the chart installs it: by Helm, in a `restricted` namespace.

In: a cluster and the names of the images that its nodes hold. Out: an operator that runs. All test
files share one release, since its CRD belongs to the whole cluster. On a cluster that is not ours
it has a namespace of its own, takes a CRD that is there as it is, and goes at the end; where an
operator runs already Helm refuses, since both would have the same cluster roles.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.cluster.machine.images import OPERATOR_IMAGE, REDIS_IMAGE, ROUTER_IMAGE, SIM_IMAGE

CHART = Path(__file__).resolve().parents[3] / "charts" / "baton"
OWN = not os.environ.get("BATON_TEST_KUBECONFIG")
RELEASE = "baton"
NAMESPACE = "baton-system" if OWN else f"test-operator-{uuid.uuid4().hex[:8]}"
CRD = "crd/inferencepools.baton.dev"
DEPLOYMENT = "deployment/baton-operator"
PODS = "app.kubernetes.io/name=baton-operator"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
# Never pulled: every node of a test cluster holds them.
IMAGES = {
    "operator": OPERATOR_IMAGE,
    # For pods that bring torch by themselves (see `torch_pods`).
    "node": SIM_IMAGE,
    "sim": SIM_IMAGE,
    "router": ROUTER_IMAGE,
    "redis": REDIS_IMAGE,
    "pullPolicy": "Never",
}
LOG_LINES = 60


def install_operator(kubernetes: Kubernetes) -> None:
    """Also where it is installed already: then nothing changes."""
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": RESTRICTED},
    }
    kubernetes.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    words = ("upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE)
    values = [f"--set=images.{name}={value}" for name, value in IMAGES.items()]
    if not OWN and kubernetes.kubectl("get", CRD, "-o", "name", "--ignore-not-found"):
        values.append("--set=crds.install=false")
    try:
        kubernetes.helm(*words, "--wait", "--timeout=300s", *values)
    except CommandFailed as error:
        error.add_note(operator_log(kubernetes))
        raise


def uninstall_operator(kubernetes: Kubernetes) -> None:
    """Also where there is none."""
    words = ("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found")
    kubernetes.helm(*words, "--wait", "--timeout=300s")


def kill_operator(kubernetes: Kubernetes) -> None:
    """Without a goodbye; its Deployment makes another one."""
    words = ("delete", "pods", "-l", PODS, "-n", NAMESPACE)
    kubernetes.kubectl(*words, "--grace-period=0", "--force")


def operator_log(kubernetes: Kubernetes, lines: int = LOG_LINES) -> str:
    """What its pods are and said; -1 is all of it."""
    told = []
    for words in (
        ("get", "pods", "-o", "wide"),
        ("logs", "-l", PODS, f"--tail={lines}"),
    ):
        try:
            told.append(kubernetes.kubectl(*words, "-n", NAMESPACE))
        except CommandFailed as error:
            told.append(str(error))
    return "operator:\n" + "\n".join(told)
