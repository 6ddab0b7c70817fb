"""POST /reset_prefix_cache, with vLLM's name: all nodes forget the KV in their prefix caches.

In: an authorized HTTP request (see `app`). Out: a frame to each node, and an answer that names the
nodes. Frames and jobs of this router reach a node in order: a request that is sent after the answer
finds no KV of an earlier one in a node's cache. Chunks in the store stay, until they expire.
"""

from __future__ import annotations

import logging

from aiohttp import web

from baton_protocol.errors import InvalidRequest
from baton_protocol.link import RESET_SINCE, ResetPrefixCache
from baton_router.http.json_response import json_response
from baton_router.nodes.fleet import Fleet
from baton_router.openai.answers import Closed

RESET_PATH = "/reset_prefix_cache"
_VALUES = {"true": True, "false": False}

logger = logging.getLogger(__name__)


class CacheReset(Closed):
    """`nodes` receive the frame; `missed` are those that are not connected, or of an older
    version. `success`: none is missed."""

    success: bool
    nodes: list[str]
    missed: list[str]


class PrefixCacheRoutes:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[web.RouteDef]:
        return [web.post(RESET_PATH, self.reset)]

    async def reset(self, request: web.Request) -> web.Response:
        _flag(request, "reset_running_requests")  # they do not hinder a reset
        if _flag(request, "reset_external"):
            raise InvalidRequest(
                "reset_external is true: the KV store is not cleared; its chunks expire, and nodes"
                " with --fetch=never read none for later requests",
                param="reset_external",
            )
        nodes, missed = [], []
        for name, view in sorted(self._fleet.view.nodes.items()):
            if view.connected and view.report.protocol >= RESET_SINCE:
                self._fleet.send_frame(name, ResetPrefixCache())
                nodes.append(str(name))
            else:
                missed.append(str(name))
        logger.info("prefix caches of %s are reset", ", ".join(nodes) or "no node")
        answer = CacheReset(success=not missed, nodes=nodes, missed=missed)
        return json_response(answer)


def _flag(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "false")
    if value not in _VALUES:
        raise InvalidRequest(f"{name} is {value!r}; use true or false", param=name)
    return _VALUES[value]
