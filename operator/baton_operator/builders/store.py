"""The pool's KV store: the Redis servers that it owns, and how nodes and routers reach a store.

In: a pool. Out: manifests (none for an external store), URLs without a login, the variables that
hold the login, and the CA certificate of TLS servers. The store is a cache, so it has no claims and
no persistence. Index and data are separate servers, because large values delay small commands and
the index must never evict. Every client needs the pool's password.

The pool's own secrets (Credentials) are created once from random bytes, and read back from the
pool's Secret. Only that Secret's manifest contains their values; everything else refers to its
keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from baton_kvstore.connection.endpoint import DEFAULT_PORT
from baton_kvstore.embedded.servers import INDEX_MEMORY, optional_settings
from baton_kvstore.settings import StoreSettings
from baton_operator.api.pool import Credentials, Pool
from baton_operator.api.resources import Resources
from baton_operator.api.store import ManagedStore
from baton_operator.builders.child import ChildIdentity, Manifest
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

PASSWORD_KEY = "redis-password"
ACL_KEY = "users.acl"
TOKEN_KEY = "link-token"
TENANT_KEY = "tenant-secret"
SECRET_BYTES = 32
_HEX = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}".encode())


def new_credentials(random: Callable[[int], bytes]) -> Credentials:
    """`random` returns that many unpredictable bytes, as os.urandom does."""
    return Credentials(
        redis_password=random(SECRET_BYTES).hex(),
        link_token=random(SECRET_BYTES).hex(),
        tenant_secret=random(SECRET_BYTES).hex(),
    )


def credentials_of(
    secret: Mapping[str, Any] | None,
    random: Callable[[int], bytes],
    known: Credentials | None = None,
) -> Credentials | None:
    """The credentials in the Secret; None if it is missing or invalid. A Secret without a tenant
    secret keeps its other values and gets the `known` tenant secret, because tenants would not find
    their stored KV with another one. It gets a new one if it is older than tenant secrets."""
    data = (secret or {}).get("data") or {}
    password, token = _secret_text(data.get(PASSWORD_KEY)), _secret_text(data.get(TOKEN_KEY))
    if password is None or token is None:
        return None
    tenants = _secret_text(data.get(TENANT_KEY))
    if tenants is None:
        tenants = known.tenant_secret if known is not None else random(SECRET_BYTES).hex()
    return Credentials(redis_password=password, link_token=token, tenant_secret=tenants)


def build_secret(pool: Pool) -> Manifest:
    """Keys in `data`, where they are read back from: `stringData` would be owned and never seen."""
    values = {
        PASSWORD_KEY: pool.credentials.redis_password,
        ACL_KEY: acl_file(pool.credentials.redis_password),
        TOKEN_KEY: pool.credentials.link_token,
        TENANT_KEY: pool.credentials.tenant_secret,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": ChildIdentity(pool, "auth").metadata(),
        "type": "Opaque",
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in values.items()},
    }


def acl_file(password: str) -> str:
    """Redis' ACL file: one user, with all rights and this password, which Redis keeps as a hash."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user default on #{digest} ~* &* +@all\n"


def secret_variable(
    variable: str, secret: str, key: str, *, optional: bool = False
) -> dict[str, Any]:
    """A variable that the kubelet sets from a Secret."""
    reference: dict[str, Any] = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def link_token_variable(pool: Pool) -> dict[str, Any]:
    """The token with which routers and nodes authenticate each other."""
    return secret_variable("BATON_LINK_TOKEN", ChildIdentity(pool, "auth").name, TOKEN_KEY)


def tenant_secret_variable(pool: Pool) -> dict[str, Any]:
    """The secret from which routers derive tenants' salts."""
    return secret_variable("BATON_TENANT_SECRET", ChildIdentity(pool, "auth").name, TENANT_KEY)


def _secret_text(encoded: Any) -> str | None:
    if not isinstance(encoded, str):
        return None
    try:
        text = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
    return text.decode() if _HEX.fullmatch(text) else None


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
CA_FOLDER = "/etc/baton/redis-ca"
CA_FILE = "ca.crt"


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


def data_servers(pool: Pool, managed: ManagedStore) -> list[ChildIdentity]:
    """The pool's own servers for KV bytes."""
    return [ChildIdentity(pool, "kv-data", instance=name) for name in managed.instances]


def store_settings(pool: Pool) -> StoreSettings:
    """URLs in the order that markers refer to."""
    external, managed = pool.spec.kv_store.external, pool.spec.kv_store.owned
    if external is not None:
        signed = external.ca_secret_ref is not None
        index_url, *data_urls = (
            _with_ca(url) if signed else url for url in (external.index_url, *external.data_urls)
        )
        return StoreSettings(index_url=index_url, data_urls=tuple(data_urls), pool=pool.key)
    assert managed is not None
    index, *data = ChildIdentity(pool, "kv-index"), *data_servers(pool, managed)
    return StoreSettings(
        index_url=f"redis://{index.host}:{DEFAULT_PORT}",
        data_urls=tuple(f"redis://{server.host}:{DEFAULT_PORT}" for server in data),
        pool=pool.key,
    )


def store_login(pool: Pool) -> tuple[Manifest, ...]:
    """The variables of the store's login. Flags would show it to users who may read pods."""
    external = pool.spec.kv_store.external
    if external is None:
        secret = ChildIdentity(pool, "auth").name
        return (secret_variable("BATON_REDIS_PASSWORD", secret, PASSWORD_KEY),)
    if external.secret_ref is None:
        return ()
    secret = external.secret_ref.name
    return (
        secret_variable("BATON_REDIS_USERNAME", secret, "username", optional=True),
        secret_variable("BATON_REDIS_PASSWORD", secret, "password"),
    )


def store_certificate(pool: Pool) -> Mounts:
    external = pool.spec.kv_store.external
    if external is None or external.ca_secret_ref is None:
        return Mounts()
    items = [{"key": CA_FILE, "path": CA_FILE}]
    secret = {"secretName": external.ca_secret_ref.name, "items": items}
    return Mounts(
        ({"name": "redis-ca", "secret": secret},),
        ({"name": "redis-ca", "mountPath": CA_FOLDER, "readOnly": True},),
    )


def _with_ca(url: str) -> str:
    if not url.startswith("rediss://"):
        return url
    return f"{url}?ssl_ca_certs={CA_FOLDER}/{CA_FILE}"
