"""The Redis servers that a pool owns.

In: a pool. Out: manifests, none where the store is somebody else's. The store is a cache: no
claims, no persistence. Index and data are servers of their own, since large values ruin small
commands and the index must never evict. Who reaches them needs the pool's password as well.
"""

from __future__ import annotations

from baton_kvstore.embedded import INDEX_MEMORY, OPTIONAL_SETTINGS
from baton_kvstore.endpoint import DEFAULT_PORT
from baton_operator.builders.child import Child, Manifest
from baton_operator.builders.credentials import ACL_KEY
from baton_operator.builders.pods import Mounts, container, pod_template
from baton_operator.builders.store_access import managed_store
from baton_operator.pool import Pool

MIB = 1 << 20
# A cache has nothing to save at its end.
GRACE_S = 5
ACL_FOLDER = "/etc/baton/redis"


def build_store(pool: Pool) -> tuple[Manifest, ...]:
    """Services before the pods they name."""
    managed = managed_store(pool)
    if managed is None:
        return ()
    index, data = Child(pool, "kv-index"), Child(pool, "kv-data")
    return (
        index.service("redis", DEFAULT_PORT),
        index.workload(
            "Deployment",
            _template(index, INDEX_MEMORY, "noeviction", managed.pod_template),
            replicas=1,
            # Never two behind one name: a marker would be on one and be looked up on the other.
            strategy={"type": "Recreate"},
        ),
        # No cluster IP: each pod has a name, as a marker says on which instance its chunk is.
        data.service("redis", DEFAULT_PORT, clusterIP="None"),
        data.workload(
            "StatefulSet",
            _template(data, managed.memory_bytes, "volatile-ttl", managed.pod_template),
            replicas=managed.data_instances,
            serviceName=data.name,
            podManagementPolicy="Parallel",
        ),
    )


def _template(child: Child, maxmemory: int, policy: str, override: Manifest) -> Manifest:
    users = _users(child.pool)
    server = _server(child.pool, maxmemory, policy, users)
    return pod_template(child, [server], override, grace_s=GRACE_S, volumes=users.volumes)


def _server(pool: Pool, maxmemory: int, policy: str, users: Mounts) -> Manifest:
    settings = {
        "port": str(DEFAULT_PORT),
        "aclfile": f"{ACL_FOLDER}/{ACL_KEY}",
        "save": "",
        "appendonly": "no",
        "maxmemory": str(maxmemory),
        "maxmemory-policy": policy,
        **OPTIONAL_SETTINGS,
    }
    # Above maxmemory: fragmentation, buffers of clients (a tenth at most), the process itself.
    most = f"{-(-maxmemory * 5 // (4 * MIB)) + 64}Mi"
    return container(
        pool,
        "redis",
        pool.installation.images.redis,
        command=["redis-server"],
        args=[word for name, value in settings.items() for word in (f"--{name}", value)],
        ports=[{"name": "redis", "protocol": "TCP", "containerPort": DEFAULT_PORT}],
        resources={"requests": {"memory": most}, "limits": {"memory": most}},
        livenessProbe=_probe(),
        readinessProbe=_probe(),
        volumeMounts=users.mounts,
    )


def _users(pool: Pool) -> Mounts:
    """The file of Redis' users, and nothing else of the Secret."""
    items = [{"key": ACL_KEY, "path": ACL_KEY}]
    secret = {"secretName": Child(pool, "auth").name, "items": items}
    return Mounts(
        ({"name": "users", "secret": secret},),
        ({"name": "users", "mountPath": ACL_FOLDER, "readOnly": True},),
    )


def _probe() -> Manifest:
    """Not a command: the kernel accepts also while the server is busy with a large value."""
    return {"tcpSocket": {"port": "redis"}, "periodSeconds": 5, "timeoutSeconds": 2}
