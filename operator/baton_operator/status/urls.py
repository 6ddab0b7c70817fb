"""The URLs of a pool: for clients inside the cluster, and from outside."""

from __future__ import annotations

from baton_operator.api.pool import Pool
from baton_operator.builders.child import ChildIdentity


def endpoint_of(pool: Pool) -> str:
    """The URL for OpenAI clients inside the cluster, hence with /v1."""
    return _base("http", ChildIdentity(pool, "router").host, pool.spec.router.service.port)


def url_of(pool: Pool, address: str) -> str:
    """The URL from outside if there is a route, else the endpoint. It does not include TLS and
    ports that only a Gateway knows."""
    router = pool.spec.router
    if router.ingress is not None:
        return f"{'https' if router.ingress.tls_secret_name else 'http'}://{router.ingress.host}/v1"
    hostnames = router.http_route.hostnames if router.http_route is not None else ()
    named = [name for name in hostnames if not name.startswith("*")]
    if named:
        return f"http://{named[0]}/v1"
    return _base("http", address, router.service.port) if address else endpoint_of(pool)


def _base(scheme: str, host: str, port: int) -> str:
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{port}/v1"
