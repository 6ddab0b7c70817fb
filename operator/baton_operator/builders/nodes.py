"""Prefill and decode nodes: one Deployment per role and revision.

A Deployment's template never changes. A new template is a new revision with its own Deployments
beside the old ones, so a roll-out only changes replicas. The revision is a digest of the templates,
not of the spec: an operator version that builds other pods from the same spec creates a new
revision instead of editing the old one. Both roles share the revision, because they roll out in
lockstep.

Where a node finds its model (`model_place`):

    path              in the container: the image or the podTemplate provides it
    pvc://CLAIM/...   the claim, mounted read-only
    hf://ORG/NAME     a volume into which an init container fetches. On a shared volume (a claim, or
    a
                      directory of the cluster node) one pod fetches and the others wait. An
                      unshared volume is part of the pod's ephemeral storage, with the size in the
                      spec
"""

from __future__ import annotations

import hashlib
import json

import msgspec

from baton_operator.api.model import ModelCache
from baton_operator.api.nodes import RoleSpec
from baton_operator.api.pool import Pool
from baton_operator.api.resources import Resources, gpus_of, gpus_of_pod, quantity_bytes
from baton_operator.builders.child import ChildIdentity, Manifest, NodeRevision, merged
from baton_operator.builders.pods import (
    EPHEMERAL,
    POD_IP,
    POD_NAME,
    STOP_S,
    Mounts,
    apart,
    container,
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
from baton_operator.builders.store import (
    link_token_variable,
    secret_variable,
    store_certificate,
    store_login,
    store_settings,
)
from baton_operator.names import (
    API_VERSION,
    DRAIN_S,
    FETCH_CONTAINER,
    NODE_PORT,
    SCALER_KIND,
    Component,
)
from baton_protocol.model_source import HubModel
from baton_protocol.store import ROLES, Role

NODE = "node"  # the container
CLAIM_FOLDER = "/models/pvc"
HUB_FOLDER = "/models/hub"
# Default for a model that each pod fetches for itself: one with 8 billion parameters in bfloat16
# has 16 GB. A simulated engine fetches everything except the weights.
STORAGE = "20Gi"
SIM_STORAGE = "1Gi"
MIB = 1 << 20
# Minimum speed of a hub; if it is slower, the Deployment exceeds its progress deadline.
FETCH_MI_PER_S = 10
SHARED_FETCH_S = 7200  # into a shared volume: the model's size is unknown


class ModelPlace(msgspec.Struct, frozen=True):
    """`folder` is "" without a model, which a simulated engine does not need."""

    folder: str
    mounts: Mounts = Mounts()
    init: tuple[Manifest, ...] = ()


def storage_mi(pool: Pool) -> int:
    """MiB of ephemeral storage per node for its model; 0 if the model is stored elsewhere."""
    cache = _cache(pool)
    if not isinstance(pool.spec.model.source, HubModel) or cache.claim_name or cache.host_path:
        return 0
    default = SIM_STORAGE if pool.spec.engine.kind == "sim" else STORAGE
    requested = pool.spec.model.storage
    return -(-quantity_bytes(default if requested is None else requested) // MIB)


def fetch_s(pool: Pool) -> int:
    """Seconds that a node's pod may take to fetch its model."""
    if not isinstance(pool.spec.model.source, HubModel):
        return 0
    own = storage_mi(pool)
    return -(-own // FETCH_MI_PER_S) if own else SHARED_FETCH_S


def model_place(pool: Pool, resources: Manifest) -> ModelPlace:
    """`resources` are those of the node's container."""
    source = pool.spec.model.source
    if source is None:
        return ModelPlace(pool.spec.model.path)
    if isinstance(source, HubModel):
        folder = f"{HUB_FOLDER}/{source.folder_name}"
        return ModelPlace(folder, _hub(pool), (_fetch(pool, source, resources),))
    # The volume is read-only too: otherwise the kubelet would change the owner of its files.
    claim = {"claimName": source.claim, "readOnly": True}
    mounts = Mounts(
        ({"name": "model", "persistentVolumeClaim": claim},),
        ({"name": "model", "mountPath": CLAIM_FOLDER, "readOnly": True},),
    )
    folder = f"{CLAIM_FOLDER}/{source.folder}" if source.folder else CLAIM_FOLDER
    return ModelPlace(folder, mounts)


def _cache(pool: Pool) -> ModelCache:
    return pool.spec.model.cache or ModelCache()


def _hub(pool: Pool) -> Mounts:
    """The node's read-only view; only the init container writes."""
    cache = _cache(pool)
    if cache.claim_name:
        place: Manifest = {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    elif cache.host_path:
        place = {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    else:
        place = {"emptyDir": {"sizeLimit": f"{storage_mi(pool)}Mi"}}
    return Mounts(
        ({"name": "model", **place},),
        ({"name": "model", "mountPath": HUB_FOLDER, "readOnly": True},),
    )


def _fetch(pool: Pool, source: HubModel, resources: Manifest) -> Manifest:
    token = pool.spec.model.secret_ref
    login = [secret_variable("HF_TOKEN", token.name, "token")] if token else []
    settings = {"pool": pool.key, "redis-index": store_settings(pool).index_url}
    args = ["model", "fetch", *literal([str(source)]), f"--to={HUB_FOLDER}", "--json-logs"]
    if pool.spec.engine.kind == "sim":
        args.append("--no-weights")
    if own := storage_mi(pool):
        # Otherwise the kubelet would evict the pod each time the volume is full.
        args.append(f"--room={own}MiB")
    built = container(
        pool,
        FETCH_CONTAINER,
        pool.node_image,
        command=["baton"],
        args=[*args, "--node=$(POD_NAME)", *flags(settings)],
        env=variables(POD_NAME, *store_login(pool), *login),
        resources=_without_devices(resources),
        volumeMounts=[
            {"name": "model", "mountPath": HUB_FOLDER},
            *store_certificate(pool).mounts,
        ],
    )
    if _cache(pool).host_path:
        # The kubelet creates the directory as root. Without capabilities root is only the user who
        # may write there.
        built["securityContext"] |= {"runAsNonRoot": False, "runAsUser": 0}
    return built


def _without_devices(resources: Manifest) -> Manifest:
    """The node's resources without devices: an init container without limits would take the pod
    out of the Guaranteed QoS class."""
    kept = {
        name: {key: amount for key, amount in amounts.items() if "/" not in key}
        for name, amounts in resources.items()
    }
    return {name: amounts for name, amounts in kept.items() if amounts}


def scaled_roles(pool: Pool) -> tuple[Role, ...]:
    """Roles with a PoolScaler."""
    spec = pool.spec.autoscaling
    return tuple(role for role in ROLES if spec is not None and spec.is_external(role))


def build_scalers(pool: Pool) -> tuple[Manifest, ...]:
    """PoolScalers for the roles that an external autoscaler scales.

    In: a pool. Out: manifests without a count, which the operator does not own; `seeded` adds the
    initial count for the creation, where it is required.
    """
    return tuple(build_scaler(pool, role) for role in scaled_roles(pool))


def build_scaler(pool: Pool, role: Role) -> Manifest:
    metadata = ChildIdentity(pool, role).metadata()
    return {"apiVersion": API_VERSION, "kind": SCALER_KIND, "metadata": metadata}


def seeded(scaler: Manifest, replicas: int) -> Manifest:
    return scaler | {"spec": {"replicas": replicas}}


def selector_of(pool: Pool, role: Role) -> str:
    """The label selector of the role's pods, which /scale gives to an autoscaler."""
    return ",".join(
        f"{label}={value}" for label, value in ChildIdentity(pool, role).selector().items()
    )


def build_budgets(pool: Pool) -> tuple[Manifest, ...]:
    """PodDisruptionBudgets, which limit how many pods of a role may be evicted at a time.

    Of a role with several pods one stays, or the minimum of `autoscaling`: a further eviction waits
    until the previous pod has a ready successor. A single pod is not protected, so that
    `kubectl drain` never waits forever; an evicted node drains, and its requests continue
    elsewhere. Pods that are not ready may always be evicted. A budget covers all revisions of its
    role.

    In: a pool. Out: one PodDisruptionBudget per role, and one for the routers. Redis has none: each
    server is the only one of its kind, and its data can be computed again.
    """
    spec = pool.spec
    return (
        _budget(pool, "prefill", spec.prefill.replicas, _least(pool, "prefill")),
        _budget(pool, "decode", spec.decode.replicas, _least(pool, "decode")),
        _budget(pool, "router", spec.router.replicas),
    )


def _least(pool: Pool, role: Role) -> int:
    scaling = pool.spec.autoscaling
    if scaling is None or scaling.mode != "auto" or scaling.is_external(role):
        return 1
    return scaling.bounds(role).min


def _budget(pool: Pool, component: Component, replicas: int, least: int = 1) -> Manifest:
    child = ChildIdentity(pool, component)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child.metadata(),
        "spec": {
            "minAvailable": max(0, min(least, replicas - 1)),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": child.selector()},
        },
    }


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
        "batch-invariant": _switch(engine.batch_invariant),
        "block-size": engine.block_size,
        "chunk-blocks": engine.chunk_blocks,
        "max-model-len": engine.max_model_len,
    }


def node_gpus(spec: RoleSpec) -> int:
    """The GPUs in the limits of the container `node`, from the resources or the podTemplate."""
    pod = merged(
        {"containers": [{"name": NODE, "resources": {"limits": spec.resources.limits}}]},
        spec.pod_template.get("spec") or {},
    )
    found = [item for item in pod.get("containers") or () if item.get("name") == NODE]
    return gpus_of_pod({"containers": found})


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
