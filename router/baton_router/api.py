"""The HTTP handlers, each thin: parse, ask the room's other modules, answer.

In: aiohttp requests. Out: responses; errors are raised and shaped by the middleware in `app`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from baton_protocol.errors import (
    DeadlineExceeded,
    MalformedBody,
    NotFound,
    Unavailable,
)
from baton_router.access import Trail
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

TRAIL = web.RequestKey("trail", Trail)  # set by the middleware
PLACEMENT_HEADER = "x-baton-placement"
REQUEST_ID_HEADER = "x-baton-request-id"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JSON_TYPE = "application/json"


@dataclass(slots=True)
class Api:
    """`store_state` and `unreachable` (address: why) tell /pool about the store and about nodes
    without a link; `draining` refuses new requests."""

    settings: RouterSettings
    fleet: Fleet
    dispatcher: Dispatcher
    metrics: RouterMetrics
    rng: random.Random
    clock: Callable[[], float]
    store_state: Callable[[], dict[str, Any]]
    unreachable: Callable[[], dict[str, str]]
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
        call = parse(await _body(request))
        if self.draining:
            raise Unavailable("the router is shutting down; send the request again")
        serving = self.fleet.serving(call.options.model)
        self._count(1)
        try:
            return await self._answer(request, call, serving, prefix)
        finally:
            self._count(-1)

    async def _answer(
        self, request: web.Request, call: Call, serving: Serving, prefix: str
    ) -> web.StreamResponse:
        trail = request[TRAIL]
        deadline = time.time() + self.settings.request_timeout_s
        prepared = await prepare(call, serving, trail.id, deadline=deadline, rng=self.rng)
        head = Head(
            id=prefix + trail.id,
            created=int(time.time()),
            model=serving.name,
            fingerprint=serving.sample.fingerprint,
        )
        prompts = [item.request.prompt_ids for item in prepared]
        shape = call.shape(head, prompts, serving.model.tokenizer)
        outbox = Outbox(len(prepared))
        flights = await self.dispatcher.start(prepared, outbox)
        # From here on nothing is awaited outside of the try: a client that leaves ends its flights.
        timer = asyncio.get_running_loop().call_later(
            self.settings.request_timeout_s, self._too_late, flights
        )
        watch = Stopwatch(self.metrics, self.clock, trail.started)
        trail.answer = answer = Answer(call, shape, flights, outbox, watch)
        try:
            if not call.options.stream:
                return web.Response(body=await answer.whole(), content_type=JSON_TYPE)

            def headers() -> dict[str, str]:
                return {REQUEST_ID_HEADER: trail.id, PLACEMENT_HEADER: trail.placement() or ""}

            response = await answer.stream(request, headers, self.settings.keepalive_s)
            trail.failure = answer.failure
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
                unreachable=self.unreachable(),
                running=len(self.dispatcher.flights),
            )
        )

    def _unready(self) -> str | None:
        if self.draining:
            return "the router is shutting down"
        return self.fleet.why_unready()

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


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON_TYPE)
