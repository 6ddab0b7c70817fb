"""The way to the router from outside the cluster: an Ingress, a Gateway API HTTPRoute, or none.

In: a pool. Out: manifests that lead to the router's Service; nothing where the spec names no route.
"""

from __future__ import annotations

from baton_operator.api.pool import Pool
from baton_operator.api.pool_spec import ParentRef
from baton_operator.builders.child import ChildIdentity, Manifest

INGRESS_API = "networking.k8s.io/v1"
ROUTE_API = "gateway.networking.k8s.io/v1"


def build_routes(pool: Pool) -> tuple[Manifest, ...]:
    """The kinds that the spec asks for. The Gateway API's may be unknown to the cluster."""
    router = pool.spec.router
    ingress = (_ingress(pool),) if router.ingress is not None else ()
    return (*ingress, *((_http_route(pool),) if router.http_route is not None else ()))


def _ingress(pool: Pool) -> Manifest:
    child, spec = ChildIdentity(pool, "router"), pool.spec.router.ingress
    assert spec is not None
    service = {"name": child.name, "port": {"name": "http"}}
    path = {"path": "/", "pathType": "Prefix", "backend": {"service": service}}
    tls = [{"hosts": [spec.host], "secretName": spec.tls_secret_name}]
    return {
        "apiVersion": INGRESS_API,
        "kind": "Ingress",
        "metadata": child.metadata(spec.annotations),
        "spec": {
            **({"ingressClassName": spec.class_name} if spec.class_name else {}),
            **({"tls": tls} if spec.tls_secret_name else {}),
            "rules": [{"host": spec.host, "http": {"paths": [path]}}],
        },
    }


def _http_route(pool: Pool) -> Manifest:
    child, spec = ChildIdentity(pool, "router"), pool.spec.router.http_route
    assert spec is not None
    backend = {"name": child.name, "port": pool.spec.router.service.port}
    return {
        "apiVersion": ROUTE_API,
        "kind": "HTTPRoute",
        "metadata": child.metadata(),
        "spec": {
            "parentRefs": [_parent(ref) for ref in spec.parent_refs],
            **({"hostnames": list(spec.hostnames)} if spec.hostnames else {}),
            "rules": [{"backendRefs": [backend]}],
        },
    }


def _parent(ref: ParentRef) -> Manifest:
    fields = {"name": ref.name, "namespace": ref.namespace, "sectionName": ref.section_name}
    return {key: value for key, value in fields.items() if value}
