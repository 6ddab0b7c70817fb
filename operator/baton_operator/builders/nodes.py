"""Prefill and decode nodes: one Deployment per role and revision.

A Deployment's template never changes. A new template is a new revision with its own Deployments
beside the old ones, so a roll-out only changes replicas. The revision is a digest of the templates,
not of the spec: an operator version that builds other pods from the same spec creates a new
revision instead of editing the old one. Both roles share the revision, because they roll out in
lockstep.
"""

from __future__ import annotations

import hashlib
import json

import msgspec

from baton_operator.api.nodes import RoleSpec
from baton_operator.api.pool import Pool
from baton_operator.api.record import Record
from baton_operator.api.resources import Resources, gpus_of, gpus_of_pod, quantity_bytes
from baton_operator.builders.child import ChildIdentity, Manifest, NodeRevision
from baton_operator.builders.credentials import link_token_variable
from baton_operator.builders.model import fetch_s, model_place, storage_mi
from baton_operator.builders.overrides import merge_template
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
from baton_operator.builders.store_access import store_certificate, store_login, store_settings
from baton_operator.names import DRAIN_S, NODE_PORT
from baton_protocol.store import ROLES, Role

NODE = "node"  # the container
REVISION_DIGITS = 10
# Seconds to the first /ready: process and kernels, then reading the weights twice from a slow disk.
START_S = 120
READS = 2  # every file is read once for the model's digest, once to load it
READ_BYTES_PER_S = 100 << 20
LEAST_START_S = 600  # seconds; also for a small model
UNBOUNDED_START_S = 1800  # seconds, if the model's size is unknown
# Default requests: the model decides what a node really needs. They keep the pod from being evicted
# first and reserve a core for the engine's loop.
CPU = "1"
MEMORY = "1Gi"
# /tmp holds compiler caches (the CUDA driver's is at most 1 GiB) and, if the model's directory is
# read-only, the digests of its weights.
STORAGE_MI = 512
MOST_STORAGE_MI = 5 << 10


def revision_of(pool: Pool) -> NodeRevision:
    templates = [_template(pool, role, "") for role in ROLES]
    text = json.dumps(templates, sort_keys=True, separators=(",", ":"))
    name = hashlib.sha256(text.encode()).hexdigest()[:REVISION_DIGITS]
    pairs = zip(ROLES, templates, strict=True)
    return NodeRevision(name, {role: gpus_of_pod(template["spec"]) for role, template in pairs})


def build_nodes(pool: Pool, role: Role, revision: str, replicas: int) -> Manifest:
    """The role's Deployment in the current revision; also built for 0 replicas."""
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
    command = [
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
        NODE,
        pool.node_image,
        command,
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
        # Spread the nodes, so that one lost cluster node does not take a whole role.
        affinity=apart(child.selector()),
    )


def _resources(pool: Pool, wanted: Resources) -> Manifest:
    """The defaults of ephemeral storage include the model that the pod fetches."""
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
        "quantization": engine.quantization,
        "speculative-config": _json(engine.speculative_config),
        "matmul-precision": engine.matmul_precision,
        "kv-cache-dtype": engine.kv_cache_dtype,
        "batch-invariant": _switch(engine.batch_invariant),
        "store-codec": engine.store_codec,
        "runner": engine.runner,
        "block-size": engine.block_size,
        "chunk-blocks": engine.chunk_blocks,
        "max-model-len": engine.max_model_len,
    }


def node_gpus(spec: RoleSpec) -> int:
    """The GPUs in the limits of the container `node`, from the resources or the podTemplate."""
    pod = merge_template(
        {"containers": [{"name": NODE, "resources": {"limits": spec.resources.limits}}]},
        spec.pod_template.get("spec") or {},
    )
    containers = [item for item in pod.get("containers") or () if item.get("name") == NODE]
    return gpus_of_pod({"containers": containers})


def _json(value: Record | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _switch(value: bool | None) -> str | None:
    """The value of a flag that takes auto, on or off; None leaves it out, which is auto."""
    return None if value is None else "on" if value else "off"


def _device(pool: Pool, wanted: Resources) -> str | None:
    """torch uses the name cuda for every vendor's GPU."""
    return "cuda" if _has_gpu(wanted) and pool.spec.engine.kind == "torch" else None


def _has_gpu(wanted: Resources) -> bool:
    return gpus_of(wanted.limits) > 0


def _start_s(pool: Pool, wanted: Resources) -> int:
    """Seconds until the first successful /ready; liveness probes only start after it. Without a GPU
    the memory limit bounds the model's size, and so the time to load it."""
    timeout_s, memory = pool.spec.engine.start_timeout_seconds, wanted.limits.get("memory")
    if timeout_s is not None:
        return timeout_s
    if memory is None or _has_gpu(wanted):
        return UNBOUNDED_START_S
    return max(LEAST_START_S, START_S + READS * quantity_bytes(memory) // READ_BYTES_PER_S)
