"""Which other pools route the same host name.

In: the specs of all pools, as written. Out: a `SharedHost` per clash. Two Ingresses clash if they
are of the same class, two HTTPRoutes if they attach to the same Gateway. Both are valid for the API
server, and then one pool gets the other's requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton_operator.state.cache import PoolKey
from baton_operator.state.observed import SharedHost

Place = tuple[str, ...]  # what two pools must not have in common; the last part is the host
MOST = 3  # a message that names some others is enough


def shared_hosts(key: PoolKey, specs: Mapping[PoolKey, Any]) -> tuple[SharedHost, ...]:
    own = dict(_places(key, specs.get(key)))
    if not own:
        return ()
    shared = [
        SharedHost(field=own[place], host=place[-1], pool=str(other))
        for other, spec in sorted(specs.items())
        if other != key
        for place in sorted({place for place, _ in _places(other, spec)} & own.keys())
    ]
    return tuple(shared[:MOST])


def _places(key: PoolKey, spec: Any) -> Iterator[tuple[Place, str]]:
    """Each place and the field that names it. A spec that is not valid has none: its own pool
    reports that."""
    router = _object(_object(spec).get("router"))
    ingress, route = _object(router.get("ingress")), _object(router.get("httpRoute"))
    if host := ingress.get("host"):
        yield (
            ("Ingress", str(ingress.get("className") or ""), str(host)),
            "spec.router.ingress.host",
        )
    for parent in route.get("parentRefs") or ():
        gate = _object(parent)
        where = str(gate.get("namespace") or key.namespace), str(gate.get("name"))
        for host in route.get("hostnames") or ():
            yield ("HTTPRoute", *where, str(host)), "spec.router.httpRoute.hostnames"


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
