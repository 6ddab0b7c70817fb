"""The HTTP handlers, each thin: parse, ask the room's other modules, answer.

In: aiohttp requests. Out: responses; errors are raised and shaped by the middleware in `app`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from baton_protocol.errors import BatonError, DeadlineExceeded, InvalidRequest, Unavailable
from baton_router.admission.admission import Admission
from baton_router.admission.cold_start import ColdStart
from baton_router.auth import Tenants
from baton_router.errors import RequestFailed
from baton_router.http.bodies import Body, BodyLimits
from baton_router.http.pool_status import pool_json
from baton_router.http.readiness import Health, Readiness, about_all, not_ready, wants_all
from baton_router.http.response import Answer, Stopwatch
from baton_router.http.slow_client import SlowClientGuard
from baton_router.http.sse import EventStream
from baton_router.http.start_prompts import PromptStarter
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.link import NodeLink
from baton_router.observability.explanation import encoded
from baton_router.observability.history import ExplanationHistory
from baton_router.observability.request_log import RequestLog
from baton_router.observability.tracing import Tracing
from baton_router.openai.answers import CommonFields, Model, ModelList
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.openai.endpoint import Call, Shape
from baton_router.requests.dispatcher import Dispatcher
from baton_router.requests.output_queue import OutputQueue
from baton_router.requests.tokenize import prepare
from baton_router.settings import RANKINGS, Ranking, RouterSettings

TRAIL = web.RequestKey("trail", RequestLog)  # set by the middleware
PLACEMENT_HEADER = "x-baton-placement"
POLICY_HEADER = "x-baton-policy"
OWN_ID_HEADER = "x-baton-request-id"
ID_HEADER = "x-request-id"  # the client's word for the request, or the router's own
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JSON_TYPE = "application/json"
ROUTER_DIGITS = 8


@dataclass(slots=True)
class Handlers:
    """`name` is the router's; its last digits begin the ids of its requests. `store_state` and
    `unreachable` (address: why) tell /pool about the store and about nodes without a link,
    `conflicts` about nodes whose names others have, `links` are all there are; `refused` counts
    errors by code; `draining` refuses new requests."""

    name: str
    settings: RouterSettings
    tenants: Tenants
    fleet: Fleet
    dispatcher: Dispatcher
    waking: ColdStart
    admission: Admission
    refused: Callable[[str], None]
    metrics: RouterMetrics
    explanations: ExplanationHistory
    bodies: BodyLimits
    tracing: Tracing
    rng: random.Random
    clock: Callable[[], float]
    store_state: Callable[[], dict[str, Any]]
    unreachable: Callable[[], dict[str, str]]
    conflicts: Callable[[], Sequence[NodeLink]]
    links: Callable[[], Collection[NodeLink]]
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    answering: int = 0  # calls that are held, placed, run or written

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
            web.get("/requests/{id}", self.explained),
        ]

    # --- generation -----------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, ChatCall.parse, "chatcmpl-")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CompletionCall.parse, "cmpl-")

    async def _serve(
        self, request: web.Request, parse: Callable[[bytearray], Call], prefix: str
    ) -> web.StreamResponse:
        tenant = request[TRAIL].tenant
        assert tenant is not None, "the middleware says whose request it is"
        async with self.bodies.of(request, tenant.name) as body:
            return await self._called(request, body, await body.parsed(parse), prefix)

    async def _called(
        self, request: web.Request, body: Body, call: Call, prefix: str
    ) -> web.StreamResponse:
        if self.draining:
            raise Unavailable("the router is shutting down; send the request again")
        ranking = self._ranking(request)
        stream = call.options.stream
        events = EventStream(request, self.settings.keepalive_s) if stream else None
        self._count(1)
        try:
            return await self._answer(request[TRAIL], body, call, prefix, events, ranking)
        except (BatonError, RequestFailed) as error:
            if events is None or not events.begun:
                raise
            failure = error.record() if isinstance(error, BatonError) else error.error
            request[TRAIL].failure = failure
            return await events.fail(failure)
        finally:
            self._count(-1)

    def _ranking(self, request: web.Request) -> Ranking | None:
        """The placement policy that the request asks for, where it may."""
        wanted = request.headers.get(POLICY_HEADER)
        if wanted is None or not self.settings.allow_policy_header:
            return None
        for ranking in RANKINGS:
            if wanted == ranking:
                return ranking
        known = ", ".join(RANKINGS)
        raise InvalidRequest(f"{POLICY_HEADER} is {wanted!r}; use {known}", param=POLICY_HEADER)

    async def _answer(
        self,
        trail: RequestLog,
        body: Body,
        call: Call,
        prefix: str,
        events: EventStream | None,
        ranking: Ranking | None,
    ) -> web.StreamResponse:
        """`events` of a stream. What fails raises, also where it has begun. `body` is done once its
        prompts are ids."""
        assert trail.tenant is not None, "the middleware says whose request it is"
        waits_until = await self.waking.hold(call, trail, events)
        serving = self.fleet.serving(call.options.model)
        # The time that a call was held is not its own: a node that loads takes minutes.
        deadline = self.clock() + self.settings.request_timeout_s
        async with body.turn():
            prepared = await prepare(
                call,
                serving,
                trail.id,
                tenant=trail.tenant,
                deadline=deadline,
                rng=self.rng,
                most_sequences=self.admission.most_sequences(trail.tenant_name),
                ranking=ranking,
                traceparent=trail.traceparent,
            )
        call.forget_prompts()
        body.done()
        prompts, created = [item.request.prompt_ids for item in prepared], int(time.time())
        release = PromptStarter(self.admission, self.dispatcher, trail, prepared, waits_until)
        guard = SlowClientGuard(release.fail, events, trail, self.settings.bounds.cut_off_s)
        outbox = OutputQueue(len(prepared), guard.most(prepared), guard.overflow)
        self.metrics.accepted(map(len, prompts))  # also what has to wait: it is demand
        await release.begin(outbox, events)
        flights = release.flights
        # From here on nothing is awaited outside of the try: a client that leaves ends its flights.
        timer = asyncio.get_running_loop().call_later(
            max(0.0, deadline - self.clock()), self._too_late, guard
        )

        def shape() -> Shape:
            served = flights[0].prepared.serving
            common = CommonFields(
                id=prefix + trail.id,
                created=created,
                model=served.name,
                system_fingerprint=served.kind.fingerprint,
            )
            return call.shape(common, prompts, served.model.tokenizer)

        watch = Stopwatch(self.metrics, self.clock, trail.started)
        trail.answer = answer = Answer(call, shape, flights, len(prepared), outbox, watch)
        try:
            if events is not None:
                return await answer.stream(events)
            return web.Response(body=await answer.whole(), content_type=JSON_TYPE)
        finally:
            timer.cancel()
            outbox.close()
            guard.done()
            release.end(answer.usage() if answer.placed else None)

    def _count(self, change: int) -> None:
        self.answering += change
        self.metrics.running.set(self.answering)

    def _too_late(self, guard: SlowClientGuard) -> None:
        limit = self.settings.request_timeout_s
        guard.end(DeadlineExceeded(f"the request was not done after {limit:g} s").record())

    # --- the rest -------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.Response:
        data = [self._model(name) for name in self.fleet.names()]
        return _json(ModelList(object="list", data=data))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self.fleet.names():
            raise self.fleet.no_model(name)
        return _json(self._model(name))

    async def health(self, request: web.Request) -> web.Response:
        return _json(Health(status="ok"))

    async def ready(self, request: web.Request) -> web.Response:
        reason, every = self._unready(), wants_all(request)
        answer = Readiness(ready=reason is None, reason=reason or "")
        if every:
            late = not_ready(self.fleet.view, self.links(), self.settings.expect_nodes)
            answer = about_all(reason, late)
        return _json(answer, status=200 if answer.ready else 503)

    async def metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.page(), headers={"Content-Type": METRICS_TYPE})

    async def pool(self, request: web.Request) -> web.Response:
        return _json(
            pool_json(
                self.fleet.view,
                name=self.settings.pool,
                router=self.name,
                model=next(iter(self.fleet.names()), None),
                store=self.store_state(),
                unreachable=self.unreachable(),
                conflicts=self.conflicts(),
                running=len(self.dispatcher.flights),
            )
        )

    async def explained(self, request: web.Request) -> web.Response:
        reader = request[TRAIL].tenant
        assert reader is not None, "the middleware says whose request it is"
        told = self.explanations.find(request.match_info["id"], reader)
        return web.Response(body=encoded(told), content_type=JSON_TYPE)

    def new_id(self) -> str:
        """Of a call: 32 hex digits, of which the first name its router."""
        return self.name[-ROUTER_DIGITS:] + secrets.token_hex(16 - ROUTER_DIGITS // 2)

    def _unready(self) -> str | None:
        if self.draining:
            return "the router is shutting down"
        return None if self.waking.on else self.fleet.why_unready()

    def _model(self, name: str) -> Model:
        lengths = [one.max_model_len for one in self.fleet.offered() if name in one.names]
        made = [one.made for one in self.fleet.known() if name in one.names and one.made]
        return Model(
            id=name,
            object="model",
            created=min(made, default=self.started),
            owned_by="baton",
            max_model_len=min(lengths, default=None),
        )


def _json(body: msgspec.Struct | dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON_TYPE)
