"""POST /nodes/{node}/sleep and /wake, for operators: a node gives its engine's memory back.

In: authorized HTTP requests (see `app`). Out: calls of the node's own routes, and an answer once
the node has obeyed. A node that sleeps by this route stays asleep until an operator wakes it,
whatever waits in routers.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from aiohttp import web

from baton_protocol.errors import InvalidRequest, Unavailable
from baton_protocol.ids import NodeId
from baton_protocol.node_sleep import NODE_SLEEP_MODES, SLEEP_PATH, SLEEP_SINCE, WAKE_PATH
from baton_router.http.body_limits import BodyLimits
from baton_router.http.json_response import json_response
from baton_router.http.node_path import node_of
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.node_calls import NodeCallFailed, NodeCalls, Query
from baton_router.openai.answers import Closed
from baton_router.openai.fields.kinds import choice, integer, texts
from baton_router.openai.fields.table import FieldTable, optional, read_fields
from baton_router.openai.json_body import decode_optional_object

MOST_TAGS, LONGEST_TAG = 8, 32
OLDER = f"sleep needs {SLEEP_SINCE}; replace the node"

logger = logging.getLogger(__name__)


class SleepFields(FieldTable, route="/nodes/{node}/sleep"):
    """The body of a sleep."""

    level = optional(
        integer(1, 2),
        "1: KV is given back, and weights go to host memory; 2: weights are given back too",
        default="1",
    )
    mode = optional(
        choice(*NODE_SLEEP_MODES),
        "`move`: requests may end there until `--drain-timeout`, then other nodes continue them;"
        " `wait`: they end there; `abort`: other nodes continue them at once",
        default="`move`",
    )


class WakeFields(FieldTable, route="/nodes/{node}/wake"):
    """The body of a wake-up."""

    tags = optional(
        texts(MOST_TAGS, LONGEST_TAG), "what is restored: `weights`, `kv_cache`", default="both"
    )


class NodeSleep(Closed):
    """A node that has obeyed. `away`: what its engine has given back; empty if it is awake."""

    node: str
    away: tuple[str, ...]


class SleepRoutes:
    def __init__(self, fleet: Fleet, calls: NodeCalls, bodies: BodyLimits) -> None:
        self._fleet = fleet
        self._calls = calls
        self._bodies = bodies

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/nodes/{node}/sleep", self.sleep),
            web.post("/nodes/{node}/wake", self.wake),
        ]

    async def sleep(self, request: web.Request) -> web.Response:
        node = node_of(request, self._fleet.view, SLEEP_SINCE, OLDER)
        fields = read_fields(SleepFields, decode_optional_object(await self._bodies.read(request)))
        logger.info("telling %s to sleep", node)
        query = {"level": str(fields.level or 1), "mode": fields.mode or "move"}
        return await self._call(node, SLEEP_PATH, query)

    async def wake(self, request: web.Request) -> web.Response:
        node = node_of(request, self._fleet.view, SLEEP_SINCE, OLDER)
        fields = read_fields(WakeFields, decode_optional_object(await self._bodies.read(request)))
        logger.info("telling %s to wake up", node)
        return await self._call(node, WAKE_PATH, [("tags", tag) for tag in fields.tags or ()])

    async def _call(self, node: NodeId, path: str, query: Query) -> web.Response:
        try:
            state = await self._calls.post(node, path, query)
        except NodeCallFailed as error:
            if error.status == HTTPStatus.BAD_REQUEST:
                raise InvalidRequest(str(error)) from error
            raise Unavailable(str(error)) from error
        return json_response(NodeSleep(node=node, away=state.away))
