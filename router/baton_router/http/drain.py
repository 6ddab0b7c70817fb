"""POST /nodes/{node}/drain and /resume, for operators and for the component that scales the pool.

In: authorized HTTP requests (see `app`), and the nodes' later reports. Out: DrainNode and
ResumeNode frames, and an answer once the node has obeyed. All routers learn of a drain from the
node itself. A drain with `replaced_by` is sent only once other nodes can serve here: Kubernetes
calls them ready a moment before this router knows all it needs of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Literal

from aiohttp import web

from baton_protocol.errors import Unavailable
from baton_protocol.ids import NodeId
from baton_protocol.link import DRAIN_SINCE, DrainNode, ResumeNode
from baton_router.http.body_limits import BodyLimits
from baton_router.http.json_response import json_response
from baton_router.http.node_path import node_of
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.node_view import NodeView, state_of
from baton_router.openai.answers import Closed
from baton_router.openai.fields.kinds import number, text
from baton_router.openai.fields.table import FieldTable, optional, read_fields
from baton_router.openai.json_body import decode_optional_object

DrainState = Literal["draining", "ready"]
OLDER = f"draining needs {DRAIN_SINCE}; end the node with SIGTERM instead, which drains it"
POLL_S = 0.01
MAX_REASON = 200
# One line: no control characters and no Unicode line separators.
REASON = re.compile(rf"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{{0,{MAX_REASON}}}")
REVISION = re.compile(r"[a-z0-9-]{0,63}")

logger = logging.getLogger(__name__)


class DrainFields(FieldTable, route="/nodes/{node}/drain"):
    """The body of a drain."""

    deadline_s = optional(
        number(0.0), "seconds that running requests may stay", "`--drain-timeout`"
    )
    reason = optional(
        text(
            pattern=REASON.pattern,
            allowed=f"it must be one line of at most {MAX_REASON} characters",
        ),
        "one line for logs and `/pool`",
    )
    replaced_by = optional(
        text(
            pattern=REVISION.pattern,
            allowed="it must name a revision with at most 63 of a to z, 0 to 9 and -",
        ),
        "the revision that replaces the node's ([rolling out](operations/upgrade.md#rolling-out))",
    )


class ResumeFields(FieldTable, route="/nodes/{node}/resume"):
    """The body of a drain's end, which has no fields."""


class NodeDrain(Closed):
    """The state of a node that confirmed a drain or its end."""

    node: str
    state: DrainState
    requests: int


class DrainRoutes:
    """The drain routes. `answer_s`: seconds for other nodes to become able to serve, and for the
    node to obey."""

    def __init__(
        self, fleet: Fleet, bodies: BodyLimits, clock: Callable[[], float], answer_s: float
    ) -> None:
        self._fleet = fleet
        self._bodies = bodies
        self._clock = clock
        self._answer_s = answer_s
        self._replaced: set[NodeId] = set()  # nodes whose replacement drain is in progress

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/nodes/{node}/drain", self.drain),
            web.post("/nodes/{node}/resume", self.resume),
        ]

    async def drain(self, request: web.Request) -> web.Response:
        node = self._node(request)
        drain = parse_drain(await self._bodies.read(request))
        logger.info("telling %s to drain: %s", node, drain.reason or "no reason given")
        until = self._clock() + self._answer_s
        if not drain.replaced_by:
            return await self._send_and_wait(node, drain, "draining", until)
        self._replaced.add(node)
        try:
            await self._wait_until_spared(node, until)
            return await self._send_and_wait(node, drain, "draining", until)
        finally:
            self._replaced.discard(node)

    async def resume(self, request: web.Request) -> web.Response:
        node = self._node(request)
        read_fields(ResumeFields, decode_optional_object(await self._bodies.read(request)))
        logger.info("telling %s to take requests again", node)
        return await self._send_and_wait(
            node, ResumeNode(), "ready", self._clock() + self._answer_s
        )

    def _node(self, request: web.Request) -> NodeId:
        return node_of(request, self._fleet.view, DRAIN_SINCE, OLDER)

    async def _wait_until_spared(self, node: NodeId, until: float) -> None:
        """Wait until the pool can serve without the node. Raise Unavailable after `until`."""
        while not self._fleet.view.can_spare(self._replaced | {node}):
            if self._clock() > until:
                raise Unavailable(
                    f"the router cannot serve requests without {node}: no replacement is ready "
                    f"yet ({self._fleet.view.states()})"
                )
            await asyncio.sleep(POLL_S)

    async def _send_and_wait(
        self, node: NodeId, frame: DrainNode | ResumeNode, wanted: DrainState, until: float
    ) -> web.Response:
        self._fleet.send_frame(node, frame)
        view = self._view(node)
        while not (view.connected and view.report.state == wanted):
            if self._clock() > until:
                raise Unavailable(
                    f"{node} is not {wanted} but {state_of(view)}"
                    + (f" ({view.report.reason})" if view.report.reason else "")
                )
            await asyncio.sleep(POLL_S)
            view = self._view(node)
        answer = NodeDrain(node=node, state=wanted, requests=view.report.load.requests)
        return json_response(answer)

    def _view(self, node: NodeId) -> NodeView:
        view = self._fleet.view.nodes.get(node)
        if view is None:
            raise Unavailable(f"{node} is gone")
        return view


def parse_drain(body: bytes) -> DrainNode:
    """An empty body means the node's own deadline. Raise InvalidRequest, MalformedBody."""
    fields = read_fields(DrainFields, decode_optional_object(body))
    return DrainNode(fields.deadline_s, fields.reason or "", fields.replaced_by or "")
