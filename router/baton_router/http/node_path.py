"""The node that a request's path names."""

from __future__ import annotations

from aiohttp import web

from baton_protocol.errors import InvalidRequest, NotFound
from baton_protocol.ids import NodeId
from baton_router.nodes.pool_view import PoolView


def node_of(request: web.Request, view: PoolView, since: int, otherwise: str) -> NodeId:
    """Raise NotFound for an unknown node, and InvalidRequest for one whose protocol version is
    before `since`; `otherwise` says what that one cannot do, and what to do instead."""
    node = NodeId(request.match_info["node"])
    known = view.nodes.get(node)
    if known is None:
        names = ", ".join(sorted(view.nodes)) or "none yet"
        raise NotFound(f"node {node!r} does not exist; this router knows: {names}", param="node")
    if known.report.protocol < since:
        raise InvalidRequest(
            f"{node} speaks protocol version {known.report.protocol}, and {otherwise}",
            param="node",
        )
    return node
