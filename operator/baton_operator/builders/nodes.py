"""Prefill and decode nodes: one Deployment per role and revision.

A Deployment's template never changes: another template is another revision with Deployments of its
own beside the old ones, so that a roll-out is a matter of replicas. The revision is a digest of the
very templates, not of the spec: an operator that builds other pods from the same spec makes a new
revision too, instead of editing an old one. Both roles share it, since they roll in lockstep.
"""

from __future__ import annotations

import hashlib
import json
import typing

from baton_operator.builders.child import Child, Manifest
from baton_operator.builders.pods import DRAIN_S, STOP_S, flags, http_container, pod_template
from baton_operator.builders.store import store_settings
from baton_operator.pool import Pool
from baton_protocol.store import Role

ROLES: tuple[Role, ...] = typing.get_args(Role)
PORT = 9000
REVISION_DIGITS = 10


def revision_of(pool: Pool) -> str:
    """What the pool's nodes are now to be made from: hex digits for names and labels."""
    templates = [_template(pool, role, "") for role in ROLES]
    text = json.dumps(templates, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_DIGITS]


def build_nodes(pool: Pool, role: Role) -> Manifest:
    """The role's Deployment in the current revision, also with no replicas."""
    revision = revision_of(pool)
    replicas = {"prefill": pool.spec.prefill, "decode": pool.spec.decode}[role].replicas
    child = Child(pool, role, revision)
    return child.workload("Deployment", _template(pool, role, revision), replicas=replicas)


def _template(pool: Pool, role: Role, revision: str) -> Manifest:
    words = [
        role,
        "--json-logs",
        "--node=$(POD_NAME)",
        f"--address=http://$(POD_IP):{PORT}",
        *flags(_settings(pool, revision)),
    ]
    container = http_container("node", pool.images.node, words, PORT)
    # Not BATON_...: such a variable that no flag reads is an error.
    container["env"] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    return pod_template(Child(pool, role, revision), container, DRAIN_S + STOP_S)


def _settings(pool: Pool, revision: str) -> dict[str, str | int | None]:
    engine, store = pool.spec.engine, store_settings(pool)
    return {
        "host": "0.0.0.0",
        "port": PORT,
        "pool": pool.key,
        "revision": revision,
        "redis-index": store.index_url,
        "redis-data": ",".join(store.data_urls),
        "drain-timeout": DRAIN_S,
        "engine": engine.kind,
        "model": pool.spec.model.path or None,
        "dtype": engine.dtype,
        "block-size": engine.block_size,
        "chunk-blocks": engine.chunk_blocks,
        "max-model-len": engine.max_model_len,
    }
