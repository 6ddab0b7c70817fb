"""The node's admin routes, with the names of vLLM's.

    POST /sleep?level=1&mode=    drain, then give back KV (level 1) or KV and weights (level 2);
                                 mode: see NodeSleepMode. &idle_s=: for routers (see `sleeping`)
    POST /wake_up?tags=          restore what the tags name (weights, kv_cache), or all
    GET /is_sleeping             {"is_sleeping": bool, "away": [...]}
    POST /update_weights         {"path": FOLDER}: drain, then serve the weights of that folder
    POST /profile, /start_profile, /stop_profile        see `profiles`

In: authorized HTTP requests. Out: calls of the node's Sleeping and Profiles; WeightsUpdates for the
process's life (see `run_node`), since other weights are another engine with another epoch. An
answer comes when the act is done: 400 names what is wrong with a request, 409 why the node stays as
it was.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from aiohttp import web

from baton_engine.interface import LEVELS, PARTS, Part
from baton_node.artifacts import ModelFiles
from baton_node.errors import SetupError
from baton_node.server.node import Node
from baton_node.server.sleeping import SleepRefusedError, WeightsChangedError
from baton_node.settings import NodeSettings
from baton_protocol.node_sleep import NODE_SLEEP_MODES, SLEEP_PATH, WAKE_PATH, SleepState

IdleSeconds = Annotated[float, msgspec.Meta(ge=0)]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """An engine to start in place of the one that runs. `done` gets an error if it cannot be
    started; the old one runs again then."""

    settings: NodeSettings
    done: asyncio.Future[None]


class WeightsBody(msgspec.Struct, forbid_unknown_fields=True):
    path: str


class AdminServer(Protocol):
    """What the routes need of the node's server."""

    service: Node | None

    @property
    def settings(self) -> NodeSettings: ...

    def admit(self, request: web.Request) -> None:
        """Raise 401 unless the request has the link token, if the node has one."""


class AdminRoutes:
    def __init__(self, server: AdminServer) -> None:
        self._server = server
        self.updates: asyncio.Queue[WeightsUpdate] = asyncio.Queue()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(SLEEP_PATH, self.sleep),
            web.post(WAKE_PATH, self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
            web.post("/update_weights", self.update_weights),
            web.post("/profile", self.profile),
            web.post("/start_profile", self.start_profile),
            web.post("/stop_profile", self.stop_profile),
        ]

    async def sleep(self, request: web.Request) -> web.Response:
        node = self._node(request)
        asked = request.query.get("level", "1")
        level = next((level for level in LEVELS if str(level) == asked), None)
        if level is None:
            raise web.HTTPBadRequest(text=f"level {asked!r} is unknown; use 1 or 2\n")
        mode = request.query.get("mode", "move")
        if mode not in NODE_SLEEP_MODES:
            known = ", ".join(NODE_SLEEP_MODES)
            raise web.HTTPBadRequest(text=f"mode {mode!r} is unknown; use {known}\n")
        try:
            await node.sleeping.sleep(level, mode, _idle_s(request))
        except SleepRefusedError as error:
            raise web.HTTPConflict(text=f"{error}\n") from error
        return self._state(node)

    async def wake_up(self, request: web.Request) -> web.Response:
        node = self._node(request)
        try:
            tags = request.query.getall("tags", list(PARTS))
            await node.sleeping.wake_up(msgspec.convert(tags, tuple[Part, ...]))
        except msgspec.ValidationError as error:
            raise web.HTTPBadRequest(text=f"tags: {error}; use {' or '.join(PARTS)}\n") from error
        except SleepRefusedError as error:
            raise web.HTTPConflict(text=f"{error}\n") from error
        except WeightsChangedError:
            logger.info("the folder has other weights than before the sleep")
            await self._replace_engine(self._server.settings)
            node = self._node(request)
        return self._state(node)

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return self._state(self._node(request))

    async def update_weights(self, request: web.Request) -> web.Response:
        self._node(request)
        try:
            body = msgspec.json.decode(await request.read(), type=WeightsBody)
        except msgspec.MsgspecError as error:
            raise web.HTTPBadRequest(text=f'{error}; the body is {{"path": FOLDER}}\n') from error
        settings = self._server.settings
        if settings.engine == "sim":
            raise web.HTTPBadRequest(text="the simulated engine has no weights\n")
        # Clients know the model by the same name as before.
        name = settings.model_name()
        changed = replace(settings, model=body.path, served_model_name=(name,))
        try:
            if not Path(body.path).exists():
                raise SetupError(f"{body.path} does not exist on this node")
            ModelFiles.load(changed)
        except SetupError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        await self._replace_engine(changed)
        return self._state(self._node(request))

    async def profile(self, request: web.Request) -> web.Response:
        return await self._node(request).profiles.profile(request)

    async def start_profile(self, request: web.Request) -> web.Response:
        return await self._node(request).profiles.start(request)

    async def stop_profile(self, request: web.Request) -> web.Response:
        return await self._node(request).profiles.stop(request)

    async def _replace_engine(self, settings: NodeSettings) -> None:
        done = asyncio.get_running_loop().create_future()
        self.updates.put_nowait(WeightsUpdate(settings, done))
        try:
            await done
        except SetupError as error:
            raise web.HTTPConflict(text=f"{error}\n") from error

    def _node(self, request: web.Request) -> Node:
        if "Origin" in request.headers:  # a browser lets any page send a POST to any host
            raise web.HTTPForbidden(text="admin routes are not for browser pages\n")
        self._server.admit(request)
        if self._server.service is None:
            raise web.HTTPServiceUnavailable(text="the engine is not ready\n")
        return self._server.service

    def _state(self, node: Node) -> web.Response:
        away = node.sleeping.away
        return web.json_response(msgspec.to_builtins(SleepState(bool(away), away)))


def _idle_s(request: web.Request) -> float | None:
    text = request.query.get("idle_s")
    if text is None:
        return None
    try:
        return msgspec.convert(text, IdleSeconds, strict=False)
    except msgspec.ValidationError as error:
        raise web.HTTPBadRequest(text=f"idle_s: {error}\n") from error
