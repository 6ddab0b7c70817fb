"""The Redis servers of a pool that owns its KV store.

In: a pool. Out: manifests; none for an external store. The store is a cache, so it has no claims
and no persistence. Index and data are separate servers, because large values delay small commands
and the index must never evict. Every client needs the pool's password.
"""

from __future__ import annotations

from baton_kvstore.connection.endpoint import DEFAULT_PORT
from baton_kvstore.connection.server_settings import INDEX_MEMORY
from baton_kvstore.embedded.servers import optional_settings
from baton_operator.api.pool import Pool
from baton_operator.api.resources import Resources
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.builders.credentials import ACL_KEY
from baton_operator.builders.pods import (
    EPHEMERAL,
    LITTLE_STORAGE,
    MOST_LITTLE_STORAGE,
    Mounts,
    apart,
    container,
    deadline_s,
    pod_template,
    resources,
    scratch_size,
    startup_probe,
)
from baton_operator.builders.store_access import data_servers

MIB = 1 << 20
# A server uses one core. The index takes 35 us per chunk of a hand-off, so a core handles 28,000
# chunks per second; a data server moves 1.2 GB/s. Each requests half a core, and uses a whole one
# if the machine has room.
CPU = "500m"
# A cache has nothing to save when it stops.
GRACE_S = 5
ACL_FOLDER = "/etc/baton/redis"
# A TCP probe and not a command: the kernel accepts even while the server handles a large value.
_CONNECTS: Manifest = {"tcpSocket": {"port": "redis"}}


def build_store(pool: Pool) -> tuple[Manifest, ...]:
    """Manifests of the managed servers, Services before pods. Each data server is a Deployment with
    its own name, because a marker names the instance of its chunk. A StatefulSet's pod would not
    come back from a lost cluster node until an administrator removes that node."""
    managed = pool.spec.kv_store.owned
    if managed is None:
        return ()
    index, override = ChildIdentity(pool, "kv-index"), managed.pod_template
    servers = [
        _one_server(index, INDEX_MEMORY, "noeviction", managed.index_resources, override),
        *(
            _one_server(
                data, managed.memory_bytes, "volatile-ttl", managed.data_resources, override
            )
            for data in data_servers(pool, managed)
        ),
    ]
    return tuple(manifest for server in servers for manifest in server)


def _one_server(
    child: ChildIdentity, maxmemory: int, policy: str, wanted: Resources, override: Manifest
) -> tuple[Manifest, Manifest]:
    users, pool = _users(child.pool), child.pool
    given = resources(wanted, _default_resources(maxmemory))
    template = pod_template(
        child,
        [_server(pool, maxmemory, policy, given, users)],
        override,
        grace_s=GRACE_S,
        scratch=scratch_size(wanted, MOST_LITTLE_STORAGE),
        volumes=users.volumes,
        **_spread(child),
    )
    # Never two servers behind one name: clients would look up chunks on the wrong one.
    alone = {"type": "Recreate"}
    return (
        child.service("redis", DEFAULT_PORT),
        child.deployment(template, deadline_s=deadline_s(template), replicas=1, strategy=alone),
    )


def _spread(child: ChildIdentity) -> Manifest:
    """Spread data servers, so that one lost cluster node does not take all. There is one index."""
    alike = ChildIdentity(child.pool, child.component)
    return {"affinity": apart(alike.selector())} if child.instance else {}


def _default_resources(maxmemory: int) -> Resources:
    # Beyond maxmemory: fragmentation, the process itself, and data that clients send before the
    # next eviction. Other client buffers count towards maxmemory, up to half of it (see kvstore's
    # `care`), and the server evicts chunks for them.
    most = f"{-(-maxmemory * 5 // (4 * MIB)) + 64}Mi"
    return Resources(
        requests={"cpu": CPU, "memory": most, EPHEMERAL: LITTLE_STORAGE},
        limits={"memory": most, EPHEMERAL: MOST_LITTLE_STORAGE},
    )


def _server(pool: Pool, maxmemory: int, policy: str, given: Manifest, users: Mounts) -> Manifest:
    settings = {
        "port": str(DEFAULT_PORT),
        "aclfile": f"{ACL_FOLDER}/{ACL_KEY}",
        "save": "",
        "appendonly": "no",
        "maxmemory": str(maxmemory),
        "maxmemory-policy": policy,
        **optional_settings(maxmemory, policy),
    }
    return container(
        pool,
        "redis",
        pool.installation.images.redis,
        command=["redis-server"],
        args=[arg for name, value in settings.items() for arg in (f"--{name}", *_words(value))],
        ports=[{"name": "redis", "protocol": "TCP", "containerPort": DEFAULT_PORT}],
        resources=given,
        startupProbe=startup_probe(_CONNECTS),
        livenessProbe=_CONNECTS | {"periodSeconds": 5, "timeoutSeconds": 2},
        readinessProbe=_CONNECTS | {"periodSeconds": 5, "timeoutSeconds": 2},
        volumeMounts=users.mounts,
    )


def _words(value: str) -> list[str]:
    """One argument per word of a setting; an empty setting is one empty argument."""
    return value.split() or [value]


def _users(pool: Pool) -> Mounts:
    """Mounts only the file of Redis' users from the Secret."""
    items = [{"key": ACL_KEY, "path": ACL_KEY}]
    secret = {"secretName": ChildIdentity(pool, "auth").name, "items": items}
    return Mounts(
        ({"name": "users", "secret": secret},),
        ({"name": "users", "mountPath": ACL_FOLDER, "readOnly": True},),
    )
