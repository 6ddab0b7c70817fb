"""How nodes and routers reach a store, whether the pool owns it or not.

In: a pool. Out: URLs without a login, the variables that hold the login, and the CA certificate of
TLS servers.
"""

from __future__ import annotations

from baton_kvstore.connection.endpoint import DEFAULT_PORT
from baton_kvstore.settings import StoreSettings
from baton_operator.api.pool import Pool
from baton_operator.api.store import ManagedStore
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.builders.credentials import PASSWORD_KEY, secret_variable
from baton_operator.builders.pods import Mounts

CA_FOLDER = "/etc/baton/redis-ca"
CA_FILE = "ca.crt"


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
