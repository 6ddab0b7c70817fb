"""Gathers answers from the sibling workers of a router, so that any worker can answer for all.

Each worker also listens on a unix socket in a folder that only its user can enter. In: a request
that a client sent to one worker. Out: the siblings' answers to the same request. They check the
client's key as usual and do not ask further siblings.

    GET /metrics         adds the siblings' own figures, with the label `worker`
    GET /pool            sums requests and bookings over all workers
    GET /ready?all=1     checks that all workers have every node
    GET /requests/{id}   asks the siblings if this worker does not know the request
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton_protocol.errors import NotFound
from baton_router.http.readiness import all_nodes_readiness, wants_all
from baton_router.server.aggregate import merge_metrics, merge_pools

ANSWER_S = 2.0
ABOUT_ONE = "/requests/"
FORWARDED = ("Authorization",)

logger = logging.getLogger(__name__)


class Peers:
    """The siblings of a worker. `path` is its own unix socket, whose stem is the worker's name.
    Siblings have `answer_s` seconds to answer."""

    def __init__(self, path: Path, answer_s: float = ANSWER_S) -> None:
        self.path = path
        self._answer_s = answer_s
        self.name = path.stem

    def others(self) -> list[Path]:
        """The sockets of the siblings that have listened so far."""
        return sorted(path for path in self.path.parent.glob("*.sock") if path != self.path)

    async def ask(self, request: web.Request) -> dict[str, bytes]:
        """Ask all siblings at once. Return the bodies of answers with status 200, by worker. A
        worker that does not answer in time is left out, since it may be starting or stopping."""
        others = self.others()
        bodies = await asyncio.gather(*(self._ask(path, request) for path in others))
        pairs = zip(others, bodies, strict=True)
        return {path.stem: body for path, body in pairs if body is not None}

    async def _ask(self, path: Path, request: web.Request) -> bytes | None:
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        try:
            async with (
                asyncio.timeout(self._answer_s),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
                session.get(f"http://localhost{request.path_qs}", headers=headers) as answer,
            ):
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.info("worker %s does not answer: %s", path.stem, error or "timeout")
            return None


def gathering(siblings: Peers) -> Middleware:
    """The middleware that answers for all workers: clients do not know of them."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "GET" or _is_sibling(request):
            return await handler(request)
        if request.path.startswith(ABOUT_ONE):
            return await _first_known(siblings, request, handler)
        response = await handler(request)
        if isinstance(response, web.Response) and response.status == 200:
            await _add(siblings, request, response)
        return response

    return middleware


async def _first_known(
    siblings: Peers, request: web.Request, handler: Handler
) -> web.StreamResponse:
    try:
        return await handler(request)
    except NotFound:
        for body in (await siblings.ask(request)).values():
            return web.Response(body=body, content_type="application/json")
        raise


async def _add(siblings: Peers, request: web.Request, response: web.Response) -> None:
    """Add the siblings' figures to this worker's answer."""
    body = response.body
    if request.path == "/ready" and wants_all(request):
        unready = {sibling.stem for sibling in siblings.others()} - (
            await siblings.ask(request)
        ).keys()
        if unready:
            names = ", ".join(sorted(unready))
            response.set_status(503)
            response.body = msgspec.json.encode(
                all_nodes_readiness(f"not ready in all workers: {names} of this router", [])
            )
        return
    if request.path not in ("/metrics", "/pool") or not isinstance(body, bytes):
        return
    others = await siblings.ask(request)
    if request.path == "/metrics":
        response.body = merge_metrics(siblings.name, body, others)
        return
    pools: Mapping[str, object] = {
        name: msgspec.json.decode(sibling) for name, sibling in others.items()
    }
    pool = merge_pools(siblings.name, msgspec.json.decode(body), pools)
    response.body = msgspec.json.encode(pool)


def _is_sibling(request: web.Request) -> bool:
    transport = request.transport
    own: socket.socket | None = transport.get_extra_info("socket") if transport else None
    return own is not None and own.family == socket.AF_UNIX
