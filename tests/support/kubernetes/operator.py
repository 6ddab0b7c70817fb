"""Installs Baton's operator in a cluster with Helm, in a `restricted` namespace.

In: a cluster and the names of images on its nodes. Out: a running operator. All test files share
one release, because its CRD is cluster-scoped. On a cluster that the tests did not create, the
operator gets its own namespace, keeps an existing CRD, and is uninstalled at the end. If the
cluster already runs an operator, Helm refuses, because both would own the same cluster roles.
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
# These images are never pulled: every node of a test cluster holds them.
IMAGES = {
    "operator": OPERATOR_IMAGE,
    # The image has no torch; pods that need it mount it (see `torch_pods`).
    "node": SIM_IMAGE,
    "sim": SIM_IMAGE,
    "router": ROUTER_IMAGE,
    "redis": REDIS_IMAGE,
    "pullPolicy": "Never",
}
LOG_LINES = 60


def install_operator(kubernetes: Kubernetes) -> None:
    """Install the operator. Idempotent."""
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": RESTRICTED},
    }
    kubernetes.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    arguments = ("upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE)
    values = [f"--set=images.{name}={value}" for name, value in IMAGES.items()]
    if not OWN and kubernetes.kubectl("get", CRD, "-o", "name", "--ignore-not-found"):
        values.append("--set=crds.install=false")
    try:
        kubernetes.helm(*arguments, "--wait", "--timeout=300s", *values)
    except CommandFailed as error:
        error.add_note(operator_log(kubernetes))
        raise


def uninstall_operator(kubernetes: Kubernetes) -> None:
    """Uninstall the operator if it is installed."""
    arguments = ("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found")
    kubernetes.helm(*arguments, "--wait", "--timeout=300s")


def kill_operator(kubernetes: Kubernetes) -> None:
    """Kill the operator's pods without a grace period; the Deployment replaces them."""
    arguments = ("delete", "pods", "-l", PODS, "-n", NAMESPACE)
    kubernetes.kubectl(*arguments, "--grace-period=0", "--force")


def operator_log(kubernetes: Kubernetes, lines: int = LOG_LINES) -> str:
    """The operator's pods, and the last `lines` lines of their logs (-1: all)."""
    outputs = []
    for arguments in (
        ("get", "pods", "-o", "wide"),
        ("logs", "-l", PODS, f"--tail={lines}"),
    ):
        try:
            outputs.append(kubernetes.kubectl(*arguments, "-n", NAMESPACE))
        except CommandFailed as error:
            outputs.append(str(error))
    return "operator:\n" + "\n".join(outputs)
