"""The HTTP handlers, each thin: parse, ask the room's other modules, answer.

In: aiohttp requests. Out: responses; errors are raised and shaped by the middleware in `app`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from baton_protocol.errors import (
    DeadlineExceeded,
    ErrorRecord,
    MalformedBody,
    NotFound,
    Unavailable,
)
from baton_router.answer import Answer, Stopwatch
from baton_router.calls import Call, Head
from baton_router.dispatch import Dispatcher, Flight
from baton_router.fleet import Fleet, Serving
from baton_router.metrics import RouterMetrics
from baton_router.openai_chat import ChatCall
from baton_router.openai_completions import CompletionCall
from baton_router.outbox import Outbox
from baton_router.pool_json import pool_json
from baton_router.prepare import prepare
from baton_router.settings import RouterSettings

# Keys of web.Request, set for the middleware.
REQUEST_ID = web.RequestKey("request_id", str)
PLACEMENT = web.RequestKey("placement", str)
FAILURE = web.RequestKey("failure", ErrorRecord)  # of a stream whose status was sent already

PLACEMENT_HEADER = "x-baton-placement"
REQUEST_ID_HEADER = "x-baton-request-id"
PLACEMENTS_SHOWN = 16
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JSON_TYPE = "application/json"


@dataclass(slots=True)
class Api:
    """`store_state` tells /pool about the store; `draining` refuses new requests."""

    settings: RouterSettings
    fleet: Fleet
    dispatcher: Dispatcher
    metrics: RouterMetrics
    rng: random.Random
    clock: Callable[[], float]
    store_state: Callable[[], dict[str, Any]]
    draining: bool = False
    answering: int = 0  # calls being placed, run or written

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics_page),
            web.get("/pool", self.pool),
        ]

    # --- generation -----------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, ChatCall.parse, "chatcmpl-")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CompletionCall.parse, "cmpl-")

    async def _serve(
        self, request: web.Request, parse: Callable[[bytes], Call], prefix: str
    ) -> web.StreamResponse:
        started = self.clock()
        call = parse(await _body(request))
        if self.draining:
            raise Unavailable("the router is shutting down; send the request again")
        serving = self.fleet.serving(call.options.model)
        self._count(1)
        try:
            return await self._answer(request, call, serving, prefix, started)
        finally:
            self._count(-1)

    async def _answer(
        self, request: web.Request, call: Call, serving: Serving, prefix: str, started: float
    ) -> web.StreamResponse:
        timeout_s, base_id = self.settings.request_timeout_s, request[REQUEST_ID]
        deadline = time.time() + timeout_s
        prepared = await prepare(call, serving, base_id, deadline=deadline, rng=self.rng)
        head = Head(
            id=prefix + base_id,
            created=int(time.time()),
            model=serving.name,
            fingerprint=serving.sample.fingerprint,
        )
        shape = call.shape(head, [item.request.prompt_ids for item in prepared])
        outbox = Outbox(len(prepared))
        flights = await self.dispatcher.start(prepared, outbox)
        request[PLACEMENT] = _placements(flights)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._too_late, flights)
        watch = Stopwatch(self.metrics, self.clock, started)
        answer = Answer(call, shape, flights, outbox, watch)
        try:
            if not call.options.stream:
                return web.Response(body=await answer.whole(), content_type=JSON_TYPE)
            headers = {REQUEST_ID_HEADER: base_id, PLACEMENT_HEADER: request[PLACEMENT]}
            response = await answer.stream(request, headers)
            if answer.failure is not None:
                request[FAILURE] = answer.failure
            return response
        finally:
            timer.cancel()
            for flight in flights:
                self.dispatcher.cancel(flight)

    def _count(self, change: int) -> None:
        self.answering += change
        self.metrics.running.set(self.answering)

    def _too_late(self, flights: list[Flight]) -> None:
        limit = self.settings.request_timeout_s
        error = DeadlineExceeded(f"the request was not done after {limit:g} s").record()
        for flight in flights:
            self.dispatcher.cancel(flight, error)

    # --- the rest -------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.Response:
        name = self.fleet.known_name()
        data = [self._model(name)] if name is not None else []
        return _json({"object": "list", "data": data})

    async def model(self, request: web.Request) -> web.Response:
        wanted, name = request.match_info["model"], self.fleet.known_name()
        if name is None or wanted != name:
            raise NotFound(
                f"model {wanted!r} does not exist; this pool serves {name!r}",
                param="model",
                code="model_not_found",
            )
        return _json(self._model(name))

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        reason = self._unready()
        if reason is None:
            return _json({"ready": True, "reason": ""})
        return _json({"ready": False, "reason": reason}, status=503)

    async def metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.page(), headers={"Content-Type": METRICS_TYPE})

    async def pool(self, request: web.Request) -> web.Response:
        return _json(
            pool_json(
                self.fleet.view,
                name=self.settings.pool,
                model=self.fleet.known_name(),
                store=self.store_state(),
                running=len(self.dispatcher.flights),
            )
        )

    def _unready(self) -> str | None:
        if self.draining:
            return "the router is shutting down"
        try:
            self.fleet.serving(None)
        except Unavailable as error:
            return error.message
        return None

    def _model(self, name: str) -> dict[str, Any]:
        lengths = [view.report.max_model_len for view in self.fleet.view.ready()]
        told = {"id": name, "object": "model", "created": 0, "owned_by": "baton"}
        return told | {"max_model_len": min(lengths, default=None)}


async def _body(request: web.Request) -> bytes:
    """Raise MalformedBody for one that its own content-encoding does not decode."""
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise MalformedBody(f"the body cannot be read: {reason}") from error


def _placements(flights: Sequence[Flight]) -> str:
    """One line for the header; of a call with many prompts the first few. Clients refuse headers
    of more than 8 KiB."""
    told = [flight.placement.line() for flight in flights[:PLACEMENTS_SHOWN]]
    more = len(flights) - len(told)
    return "; ".join([*told, f"and {more} more"] if more else told)


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON_TYPE)
