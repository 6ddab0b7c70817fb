"""The sample pool's children, as the API server returns them and as the cache keeps them."""

from __future__ import annotations

from typing import Any

from baton_operator.builders import Manifest, build_pool
from baton_operator.kube.kinds import ChildKey, key_of
from baton_operator.state.child import CachedChild, read_child
from tests.support.kubernetes.manifests import sample_pool

POOL = sample_pool("sim")
DESIRED = build_pool(POOL)
PROVEN: dict[str, Any] = {
    "conditions": [{"type": "Progressing", "reason": "NewReplicaSetAvailable"}]
}


def live(manifest: Manifest, uid: str = "u", **status: Any) -> Manifest:
    """Return the manifest as the API server would return it."""
    metadata = {**manifest["metadata"], "uid": uid, "resourceVersion": "1", "generation": 1}
    return {**manifest, "metadata": metadata, "status": {"observedGeneration": 1, **status}}


def cached(*bodies: Manifest) -> dict[ChildKey, CachedChild]:
    return {key_of(body): read_child(body) for body in bodies}


def old_nodes(**status: Any) -> list[Manifest]:
    """Return the Deployments of nodes of an older revision."""
    nodes = [live(one, **status) for one in DESIRED if "baton.dev/revision" in labels_of(one)]
    for node in nodes:
        node["metadata"]["name"] += "-old"
        node["metadata"]["labels"] = {**labels_of(node), "baton.dev/revision": "old"}
    return nodes


def labels_of(manifest: Manifest) -> dict[str, str]:
    labels: dict[str, str] = manifest["metadata"]["labels"]
    return labels
