"""Prefill and decode nodes: one Deployment per role and revision.

A Deployment's template never changes: another template is another revision with Deployments of its
own beside the old ones, so that a roll-out is a matter of replicas. The revision is a digest of the
very templates, not of the spec: an operator that builds other pods from the same spec makes a new
revision too, instead of editing an old one. Both roles share it, since they roll in lockstep.
"""

from __future__ import annotations

import hashlib
import json

from baton_operator.api.fields import Resources, gpus_of, gpus_of_pod, quantity_bytes
from baton_operator.api.pool import Pool
from baton_operator.builders.child import ChildIdentity, Manifest, NodeRevision
from baton_operator.builders.credentials import link_token_variable
from baton_operator.builders.model import fetch_s, model_place, storage_mi
from baton_operator.builders.pods import (
    EPHEMERAL,
    POD_IP,
    POD_NAME,
    STOP_S,
    apart,
    deadline_s,
    flags,
    http_container,
    http_get,
    literal,
    pod_template,
    resources,
    scratch_size,
    startup_probe,
    variables,
)
from baton_operator.builders.store import store_certificate, store_login, store_settings
from baton_operator.names import DRAIN_S, NODE_PORT
from baton_protocol.store import ROLES, Role

REVISION_DIGITS = 10
# To its first /ready: the process and its kernels, then the weights from a slow disk, twice.
START_S = 120
READS = 2  # each file once for the model's digest, once to load it
READ_BYTES_PER_S = 100 << 20
LEAST_START_S = 600  # a small model is no reason to give up early
UNBOUNDED_START_S = 1800  # nothing says how large the model may be
# What a node needs is its model's business. These keep one that says nothing from being evicted
# first, and give its engine's loop a core.
CPU = "1"
MEMORY = "1Gi"
# In /tmp lie what compilers keep (the CUDA driver's own cache is 1 GiB at most) and, where the
# model's folder is read-only, the digests of its weights.
STORAGE_MI = 512
MOST_STORAGE_MI = 5 << 10


def revision_of(pool: Pool) -> NodeRevision:
    templates = [_template(pool, role, "") for role in ROLES]
    text = json.dumps(templates, sort_keys=True, separators=(",", ":"))
    name = hashlib.sha256(text.encode()).hexdigest()[:REVISION_DIGITS]
    pairs = zip(ROLES, templates, strict=True)
    return NodeRevision(name, {role: gpus_of_pod(one["spec"]) for role, one in pairs})


def build_nodes(pool: Pool, role: Role, revision: str, replicas: int) -> Manifest:
    """The role's Deployment in the current revision, also with no replicas."""
    child = ChildIdentity(pool, role, revision)
    template = _template(pool, role, revision)
    return child.deployment(
        template,
        deadline_s=deadline_s(template, fetch_s(pool)),
        replicas=replicas,
    )


def _template(pool: Pool, role: Role, revision: str) -> Manifest:
    spec = pool.spec.role(role)
    wanted, start_s = _resources(pool, spec.resources), _start_s(pool, spec.resources)
    child = ChildIdentity(pool, role, revision)
    token = link_token_variable(pool)
    place = model_place(pool, wanted)
    mounts = place.mounts + store_certificate(pool)
    words = [
        role,
        "--json-logs",
        "--node=$(POD_NAME)",
        f"--address=http://$(POD_IP):{NODE_PORT}",
        *flags(_settings(pool, revision, place.folder)),
        *flags({"device": _device(pool, spec.resources), "start-timeout": start_s}),
        *literal(pool.spec.engine.extra_args),
    ]
    container = http_container(
        pool,
        "node",
        pool.node_image,
        words,
        NODE_PORT,
        env=variables(POD_NAME, POD_IP, *store_login(pool), token),
        resources=wanted,
        startupProbe=startup_probe(http_get("/ready"), start_s),
        volumeMounts=mounts.mounts,
    )
    return pod_template(
        child,
        [container],
        spec.pod_template,
        grace_s=DRAIN_S + STOP_S,
        scratch=scratch_size(spec.resources, f"{MOST_STORAGE_MI}Mi"),
        volumes=mounts.volumes,
        init=place.init,
        # One lost cluster node does not take all nodes of a role.
        affinity=apart(child.selector()),
    )


def _resources(pool: Pool, wanted: Resources) -> Manifest:
    """Its pod's storage also holds the model that is fetched into it."""
    model_mi = storage_mi(pool)
    default = Resources(
        requests={"cpu": CPU, "memory": MEMORY, EPHEMERAL: f"{STORAGE_MI + model_mi}Mi"},
        limits={EPHEMERAL: f"{MOST_STORAGE_MI + model_mi}Mi"},
    )
    return resources(wanted, default)


def _settings(pool: Pool, revision: str, folder: str) -> dict[str, str | int | None]:
    engine, store = pool.spec.engine, store_settings(pool)
    return {
        "host": "0.0.0.0",
        "port": NODE_PORT,
        "pool": pool.key,
        "revision": revision,
        "redis-index": store.index_url,
        "redis-data": ",".join(store.data_urls),
        "drain-timeout": DRAIN_S,
        "engine": engine.kind,
        "model": folder or None,
        "dtype": engine.dtype,
        "block-size": engine.block_size,
        "chunk-blocks": engine.chunk_blocks,
        "max-model-len": engine.max_model_len,
    }


def _device(pool: Pool, wanted: Resources) -> str | None:
    """torch calls every vendor's GPU cuda."""
    return "cuda" if _has_gpu(wanted) and pool.spec.engine.kind == "torch" else None


def _has_gpu(wanted: Resources) -> bool:
    return gpus_of(wanted.limits) > 0


def _start_s(pool: Pool, wanted: Resources) -> int:
    """Until it is ready once, a node is not asked for its health, but it must get ready in time.
    Without a GPU the memory that it may use bounds what it loads."""
    told, memory = pool.spec.engine.start_timeout_seconds, wanted.limits.get("memory")
    if told is not None:
        return told
    if memory is None or _has_gpu(wanted):
        return UNBOUNDED_START_S
    return max(LEAST_START_S, START_S + READS * quantity_bytes(memory) // READ_BYTES_PER_S)
