"""Pools that several field managers apply to a real API server."""

from __future__ import annotations

import json
from typing import Any

from baton_operator.names import API_VERSION, POOL_KIND
from tests.cluster.machine.client import Kubernetes

Json = dict[str, Any]


def pool(name: str, spec: Json | None) -> Json:
    body = {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": name}}
    return body if spec is None else body | {"spec": spec}


def apply(cluster: Kubernetes, namespace: str, manager: str, spec: Json, *args: str) -> Json:
    """Apply `spec` server-side as all fields of this manager; return the pool's whole spec."""
    body = pool("demo", spec)
    command = ("apply", "--server-side", f"--field-manager={manager}", "-n", namespace)
    stored = json.loads(
        cluster.kubectl(*command, *args, "-f", "-", "-o", "json", stdin=json.dumps(body))
    )
    spec_now: Json = stored["spec"]
    return spec_now


def write_status(cluster: Kubernetes, namespace: str, status: Json) -> None:
    args = ("patch", "bpool/demo", "-n", namespace, "--subresource=status", "--type=merge")
    cluster.kubectl(*args, "-p", json.dumps({"status": status}))
