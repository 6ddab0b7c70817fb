"""Condition RouteReady: does a known problem prevent access from outside?"""

from __future__ import annotations

from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View


def route_finding(view: View) -> Finding | None:
    """The state of the routes that the spec wants; others are ignored."""
    kinds: set[str] = {route.kind for route in view.observed.routes}
    if view.pool is not None:
        wanted = {
            "Ingress": view.pool.spec.router.ingress,
            "HTTPRoute": view.pool.spec.router.http_route,
        }
        kinds = {kind for kind, spec in wanted.items() if spec is not None}
    if not kinds:
        return None
    routes = [route for route in view.observed.routes if route.kind in kinds]
    for route in routes:
        if route.accepted is False:
            return Finding(c.ROUTE_REFUSED, f"{route.kind}: {route.message}")
    if {route.kind for route in routes} < kinds:
        return Finding(c.ROUTE_PENDING)
    if any(route.kind == "HTTPRoute" and route.accepted is None for route in routes):
        return Finding(c.ROUTE_PENDING)
    if any(route.accepted is None for route in routes):
        return Finding(c.ROUTE_UNCONFIRMED)
    return Finding(c.ROUTE_ACCEPTED)
