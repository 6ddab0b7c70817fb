"""Where a node finds its model, and the init container that fetches one.

path              in the container: the image or the podTemplate provides it
pvc://CLAIM/...   the claim, mounted read-only
hf://ORG/NAME     a volume into which an init container fetches. On a shared volume (a claim, or
                  a directory of the cluster node) one pod fetches and the others wait. An
                  unshared volume is part of the pod's ephemeral storage, with the size in the
                  spec
"""

from __future__ import annotations

import msgspec

from baton_operator.api.model import ModelCache
from baton_operator.api.pool import Pool
from baton_operator.api.resources import quantity_bytes
from baton_operator.builders.child import Manifest
from baton_operator.builders.credentials import secret_variable
from baton_operator.builders.pods import (
    POD_NAME,
    Mounts,
    container,
    flags,
    literal,
    variables,
)
from baton_operator.builders.store_access import store_certificate, store_login, store_settings
from baton_operator.names import FETCH_CONTAINER
from baton_protocol.model_source import HubModel

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
