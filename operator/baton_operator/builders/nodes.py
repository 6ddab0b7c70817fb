"""Prefill and decode nodes: one Deployment per role and revision.

A Deployment's template never changes: another template is another revision with Deployments of its
own beside the old ones, so that a roll-out is a matter of replicas. The revision is a digest of the
very templates, not of the spec: an operator that builds other pods from the same spec makes a new
revision too, instead of editing an old one. Both roles share it, since they roll in lockstep.

Where a node finds its model (`model_place`):

    path              in the container: the image or the podTemplate brings it
    pvc://CLAIM/...   the claim, mounted read-only
    hf://ORG/NAME     a volume that an init container fetches into; what pods share (a claim, or a
                      folder of the cluster's node) is fetched once, the others wait for it; what
                      they do not is part of their ephemeral storage, as large as the spec says
"""

from __future__ import annotations

import hashlib
import json

import msgspec

from baton_operator.api.fields import Resources, gpus_of, gpus_of_pod, quantity_bytes
from baton_operator.api.pool import ModelCache, Pool
from baton_operator.builders.child import ChildIdentity, Manifest, NodeRevision
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

CLAIM_FOLDER = "/models/pvc"
HUB_FOLDER = "/models/hub"
# Of a model that each pod fetches for itself, where the spec says nothing of its size: one with 8
# billion parameters in bfloat16 has 16 GB. A simulated engine fetches all but the weights.
STORAGE = "20Gi"
SIM_STORAGE = "1Gi"
MIB = 1 << 20
# From a hub, at the least; more slowly, a Deployment is said to make no progress.
FETCH_MI_PER_S = 10
SHARED_FETCH_S = 7200  # into a volume that pods share: nothing says how large it may be


class ModelPlace(msgspec.Struct, frozen=True):
    """`folder` is "" where there is no model: a simulated engine needs none."""

    folder: str
    mounts: Mounts = Mounts()
    init: tuple[Manifest, ...] = ()


def storage_mi(pool: Pool) -> int:
    """MiB of ephemeral storage that each node gives its model; 0 where that lies elsewhere."""
    cache = _cache(pool)
    if not isinstance(pool.spec.model.source, HubModel) or cache.claim_name or cache.host_path:
        return 0
    default = SIM_STORAGE if pool.spec.engine.kind == "sim" else STORAGE
    told = pool.spec.model.storage
    return -(-quantity_bytes(default if told is None else told) // MIB)


def fetch_s(pool: Pool) -> int:
    """For how long a node's pod may fetch its model."""
    if not isinstance(pool.spec.model.source, HubModel):
        return 0
    own = storage_mi(pool)
    return -(-own // FETCH_MI_PER_S) if own else SHARED_FETCH_S


def model_place(pool: Pool, resources: Manifest) -> ModelPlace:
    """`resources` are the node's."""
    source = pool.spec.model.source
    if source is None:
        return ModelPlace(pool.spec.model.path)
    if isinstance(source, HubModel):
        folder = f"{HUB_FOLDER}/{source.folder_name}"
        return ModelPlace(folder, _hub(pool), (_fetch(pool, source, resources),))
    # Read-only also as a volume: else the kubelet would change the owner of its files.
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
    """As the node sees it: only the init container writes."""
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
    words = ["model", "fetch", *literal([str(source)]), f"--to={HUB_FOLDER}", "--json-logs"]
    if pool.spec.engine.kind == "sim":
        words.append("--no-weights")
    if own := storage_mi(pool):
        # Else the kubelet would evict the pod when the volume is full, again and again.
        words.append(f"--room={own}MiB")
    built = container(
        pool,
        FETCH_CONTAINER,
        pool.node_image,
        command=["baton"],
        args=[*words, "--node=$(POD_NAME)", *flags(settings)],
        env=variables(POD_NAME, *store_login(pool), *login),
        resources=_without_devices(resources),
        volumeMounts=[
            {"name": "model", "mountPath": HUB_FOLDER},
            *store_certificate(pool).mounts,
        ],
    )
    if _cache(pool).host_path:
        # The kubelet makes the folder, and makes it root's. Without any capability root is just
        # the one who may write there.
        built["securityContext"] |= {"runAsNonRoot": False, "runAsUser": 0}
    return built


def _without_devices(resources: Manifest) -> Manifest:
    """What is left of the node's: without limits of its own, the init container would take the
    pod out of the Guaranteed class."""
    kept = {
        name: {key: amount for key, amount in amounts.items() if "/" not in key}
        for name, amounts in resources.items()
    }
    return {name: amounts for name, amounts in kept.items() if amounts}


def scaled_roles(pool: Pool) -> tuple[Role, ...]:
    """Those with a PoolScaler."""
    spec = pool.spec.autoscaling
    return tuple(role for role in ROLES if spec is not None and spec.is_external(role))


def build_scalers(pool: Pool) -> tuple[Manifest, ...]:
    """PoolScalers: for each role whose count somebody else says.

    In: a pool. Out: manifests without a count, which is not the operator's; `seeded` is what one is
    made from, as the count must not be missing.
    """
    return tuple(build_scaler(pool, role) for role in scaled_roles(pool))


def build_scaler(pool: Pool, role: Role) -> Manifest:
    metadata = ChildIdentity(pool, role).metadata()
    return {"apiVersion": API_VERSION, "kind": SCALER_KIND, "metadata": metadata}


def seeded(scaler: Manifest, replicas: int) -> Manifest:
    return scaler | {"spec": {"replicas": replicas}}


def selector_of(pool: Pool, role: Role) -> str:
    """Of the role's pods, as /scale gives it to an autoscaler."""
    return ",".join(
        f"{label}={value}" for label, value in ChildIdentity(pool, role).selector().items()
    )


def build_budgets(pool: Pool) -> tuple[Manifest, ...]:
    """How many pods of a role somebody may evict at a time, as `kubectl drain` does.

    One of each role stays, where there are more, or as many as `autoscaling` wants at least: an
    eviction that would take one of them waits until the one before has its successor. Of a role
    with a single pod nothing is kept, and `kubectl drain` never waits for a pod that cannot be: its
    requests go on elsewhere, since an evicted node drains first. Pods that are not ready may always
    go. A budget is of all revisions of its role.

    In: a pool. Out: one PodDisruptionBudget per role, and one for the routers. Redis has none: each
    of its servers is the only one of its kind, and does its work again from nothing.
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
