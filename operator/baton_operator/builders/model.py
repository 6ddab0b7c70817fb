"""Where a node finds its model, and what its pod needs for that.

    path              in the container: the image or the podTemplate brings it
    pvc://CLAIM/...   the claim, mounted read-only
    hf://ORG/NAME     a volume that an init container fetches into; what pods share (a claim, or a
                      folder of the cluster's node) is fetched once, the others wait for it; what
                      they do not is part of their ephemeral storage, as large as the spec says

In: a pool. Out: the folder's name, volumes, the init container.
"""

from __future__ import annotations

import msgspec

from baton_operator.api.fields import quantity_bytes
from baton_operator.api.pool import Pool
from baton_operator.api.pool_spec import ModelCache
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
from baton_operator.builders.store import store_certificate, store_login, store_settings
from baton_operator.names import FETCH_CONTAINER
from baton_protocol.model_source import HubModel

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
