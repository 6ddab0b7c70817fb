"""Objects of one pool, as a watch shows them."""

from __future__ import annotations

from typing import Any

from tests.support.kubernetes.pod_bodies import Body, container


def fetcher(state: Body, last: Body | None = None) -> Body:
    return container(state, last, name="fetch-model")


def service(version: int, port: int = 1, uid: str = "u", **metadata: Any) -> dict[str, Any]:
    labels = {"baton.dev/pool": "pool", "baton.dev/component": "router"}
    own = {"name": "pool-router", "namespace": "ns", "uid": uid, "labels": labels}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**own, "resourceVersion": str(version), **metadata},
        "spec": {"ports": [{"port": port}]},
        "status": {},
    }


def pool(version: int, uid: str = "u") -> dict[str, Any]:
    metadata = {"name": "pool", "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}}


def pod(version: int, *, ready: bool, uid: str = "p", **annotations: str) -> dict[str, Any]:
    """Return a pod whose timestamps are decades away from the operator's clock."""
    labels = {"baton.dev/pool": "pool", "baton.dev/component": "decode"}
    metadata = {"name": "pool-decode-0", "namespace": "ns", "uid": uid, "labels": labels}
    condition = {
        "type": "Ready",
        "status": str(ready),
        "lastTransitionTime": f"19{ready:d}0-01-01",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "resourceVersion": str(version), "annotations": annotations},
        "spec": {"containers": []},
        "status": {"phase": "Running", "conditions": [condition]},
    }
