"""GET /ready: whether a request would be served now; with `?all=1`, whether every node is ready.

In: the view, the links, and the expected nodes. Out: the nodes that are not ready, with their
state. "Every node" means every node that discovery has found (registry or `--nodes`) and that has
not left since, plus every expected one. A draining node, or one whose name a newer node has taken,
is not ready; one that sleeps until a request comes is. A node that still loads its model is in no
registry, so only `expect_nodes` can wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from aiohttp import web
from msgspec import UNSET, UnsetType

from baton_protocol.errors import InvalidRequest
from baton_router.nodes.link import NodeLink
from baton_router.nodes.node_view import state_of
from baton_router.nodes.pool_view import PoolView
from baton_router.openai.answers import Closed

_ANSWERS = {"1": True, "true": True, "0": False, "false": False}


class Health(Closed):
    status: Literal["ok"]


class LateNode(Closed):
    """A node that is not ready. `address` is None for an expected node that was never found, `node`
    is None if only the address is known."""

    node: str | None
    address: str | None
    state: str
    reason: str


class Readiness(Closed):
    """`reason` is empty if ready. `not_ready` is set only if the request has `all`."""

    ready: bool
    reason: str
    not_ready: list[LateNode] | UnsetType = UNSET


def wants_all(request: web.Request) -> bool:
    """Whether `?all` asks about every node. Raise InvalidRequest for any other value."""
    values = request.query.getall("all", [])
    if not values:
        return False
    if len(values) > 1 or values[0] not in _ANSWERS:
        shown = values[0] if len(values) == 1 else values
        raise InvalidRequest(
            f"all is {shown!r}; use 1 or true for every node, or 0 or false for the "
            "pool as a whole",
            param="all",
        )
    return _ANSWERS[values[0]]


def not_ready(view: PoolView, links: Iterable[NodeLink], expected: Sequence[str]) -> list[LateNode]:
    """Nodes that are not ready: known nodes, then addresses without a node, then missing names."""
    nodes = sorted(view.nodes.values(), key=lambda node: node.report.node)
    late = [
        _late(node.report.node, node.report.address, state_of(node), node.report.reason)
        for node in nodes
        if not (node.ready or node.wakes)
    ]
    for link in links:
        if link.rival and link.report is not None:
            why = f"a newer node at {link.rival} has the same name"
            late.append(_late(link.report.node, link.address, "unused", why))
        elif link.report is None:
            why = link.trouble or "the router has not connected to it yet"
            late.append(_late(None, link.address, "unreachable", why))
    missing = [name for name in expected if name not in view.nodes]
    return late + [_late(name, None, "missing", "it has not registered yet") for name in missing]


def all_nodes_readiness(reason: str | None, late: list[LateNode]) -> Readiness:
    """The answer for all nodes. `reason`: why no request would be served; None if one would."""
    if reason is None and late:
        names = ", ".join(f"{node.node or node.address} ({node.state})" for node in late)
        reason = f"not ready: {names}"
    return Readiness(ready=reason is None, reason=reason or "", not_ready=late)


def _late(node: str | None, address: str | None, state: str, reason: str) -> LateNode:
    return LateNode(node=node, address=address, state=state, reason=reason)
