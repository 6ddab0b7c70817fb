"""The pool's KV store: the Redis servers it owns, or the addresses of somebody else's.

In: a pool. Out: manifests of a managed store (none for an external one), and `store_settings`, what
nodes and router are told either way. The store is a cache: no volumes, no persistence. Index and
data are servers of their own, since large values ruin small commands and the index must never
evict. Whoever reaches the servers may use them: until credentials and NetworkPolicies are built,
a managed store is as private as the cluster's pod network.
"""

from __future__ import annotations

from baton_kvstore.embedded import INDEX_MEMORY, OPTIONAL_SETTINGS
from baton_kvstore.endpoint import DEFAULT_PORT
from baton_kvstore.settings import StoreSettings
from baton_operator.builders.child import Child, Manifest
from baton_operator.builders.pods import pod_template
from baton_operator.pool import Pool
from baton_operator.spec import ManagedStore

MIB = 1 << 20
# A cache has nothing to save at its end.
GRACE_S = 5


def store_settings(pool: Pool) -> StoreSettings:
    """URLs in the order that markers count on: data instance i is pod i."""
    external = pool.spec.kv_store.external
    if external is not None:
        return StoreSettings(
            index_url=external.index_url, data_urls=external.data_urls, pool=pool.key
        )
    index, data = Child(pool, "kv-index"), Child(pool, "kv-data")
    pods = [f"{data.name}-{number}.{data.host}" for number in range(_managed(pool).data_instances)]
    return StoreSettings(
        index_url=f"redis://{index.host}:{DEFAULT_PORT}",
        data_urls=tuple(f"redis://{pod}:{DEFAULT_PORT}" for pod in pods),
        pool=pool.key,
    )


def build_store(pool: Pool) -> tuple[Manifest, ...]:
    """Services before the pods they name."""
    if pool.spec.kv_store.external is not None:
        return ()
    managed, image = _managed(pool), pool.images.redis
    index, data = Child(pool, "kv-index"), Child(pool, "kv-data")
    index_pod = _redis(image, INDEX_MEMORY, "noeviction")
    data_pod = _redis(image, managed.memory_bytes, "volatile-ttl")
    return (
        index.service("redis", DEFAULT_PORT),
        index.workload(
            "Deployment",
            pod_template(index, index_pod, GRACE_S),
            replicas=1,
            # Never two behind one name: a marker would be on one and be looked up on the other.
            strategy={"type": "Recreate"},
        ),
        # No cluster IP: each pod has a name, as a marker says on which instance its chunk is.
        data.service("redis", DEFAULT_PORT, clusterIP="None"),
        data.workload(
            "StatefulSet",
            pod_template(data, data_pod, GRACE_S),
            replicas=managed.data_instances,
            serviceName=data.name,
            podManagementPolicy="Parallel",
        ),
    )


def _managed(pool: Pool) -> ManagedStore:
    return pool.spec.kv_store.managed or ManagedStore()


def _redis(image: str, maxmemory: int, policy: str) -> Manifest:
    settings = {
        "port": str(DEFAULT_PORT),
        "protected-mode": "no",  # else it answers only its own pod
        "save": "",
        "appendonly": "no",
        "maxmemory": str(maxmemory),
        "maxmemory-policy": policy,
        **OPTIONAL_SETTINGS,
    }
    # Above maxmemory: fragmentation, buffers of clients (a tenth at most), the process itself.
    most = f"{-(-maxmemory * 5 // (4 * MIB)) + 64}Mi"
    return {
        "name": "redis",
        "image": image,
        "command": ["redis-server"],
        "args": [word for name, value in settings.items() for word in (f"--{name}", value)],
        "ports": [{"name": "redis", "containerPort": DEFAULT_PORT}],
        "resources": {"requests": {"memory": most}, "limits": {"memory": most}},
        "livenessProbe": _probe(),
        "readinessProbe": _probe(),
    }


def _probe() -> Manifest:
    """Not a command: the kernel accepts also while the server is busy with a large value."""
    return {"tcpSocket": {"port": "redis"}, "periodSeconds": 5, "timeoutSeconds": 2}
