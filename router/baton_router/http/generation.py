"""POST /v1/chat/completions and /v1/completions: one call, from its body to its answer.

In: aiohttp requests; the middleware has set their tenant. Out: responses. Errors are raised, and
the middleware in `app` formats them. The first prompt of a call starts before the answer begins,
the others while it is written, as admission lets them in. A call that has begun has no queue
timeout: only its deadline, its client or an error ends it. Its waiting prompts then leave the
queue, and its running ones are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from baton_protocol.errors import (
    BatonError,
    DeadlineExceeded,
    ErrorRecord,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from baton_router.admission.admission import Admission, ColdStart
from baton_router.admission.tenant_limits import BudgetBooking
from baton_router.errors import RequestFailed
from baton_router.http.body_limits import Body, BodyLimits
from baton_router.http.headers import POLICY_HEADER
from baton_router.http.response import Answer, EventStream, SlowClientGuard, Stopwatch
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.nodes.fleet import Fleet
from baton_router.observability.request_log import ExplanationHistory, RequestLog, Tracing
from baton_router.openai.answers import CommonFields, Usage
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
from baton_router.openai.endpoint import Call, Shape
from baton_router.requests.dispatcher import Dispatcher
from baton_router.requests.in_flight import InFlightRequest, OutputQueue, Prepared
from baton_router.requests.tokenize import prepare
from baton_router.settings import RANKINGS, Ranking, RouterSettings

TRAIL = web.RequestKey("trail", RequestLog)  # set by the middleware
JSON_TYPE = "application/json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """The stages before placement: reading the body, cold start, admission."""

    bodies: BodyLimits
    cold_start: ColdStart
    admission: Admission


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Parts that record how each call began and ended. `refused` counts errors by code."""

    metrics: RouterMetrics
    refused: Callable[[str], None]
    explanations: ExplanationHistory
    tracing: Tracing

    def begin(self, trail: RequestLog, traceparent: str) -> None:
        trail.trace = self.tracing.begin(traceparent)
        self.explanations.begin(trail)

    def end(self, trail: RequestLog, status: int, now: float) -> None:
        """Record the end of a call. A bug in explanation or tracing must not cost the answer."""
        self.metrics.answered(trail.endpoint, status)
        trail.log(status, now)
        if trail.failure is not None:
            self.refused(trail.failure.code)
        try:
            self.explanations.end(trail, status)
            self.tracing.end(trail, status)
        except Exception:
            logger.exception(
                "cannot record the request's explanation or trace", extra={"request": trail.id}
            )


@dataclass(slots=True, kw_only=True)
class GenerationRoutes:
    """The generation routes. `draining` refuses new calls. `answering` counts calls that are held,
    queued, running or being written."""

    settings: RouterSettings
    fleet: Fleet
    dispatcher: Dispatcher
    intake: Intake
    observers: Observers
    rng: random.Random
    clock: Callable[[], float]
    draining: bool = False
    answering: int = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    def why_unready(self) -> str | None:
        """Why a new call would not be served now; None if it would."""
        if self.draining:
            return "the router is shutting down"
        return None if self.intake.cold_start.on else self.fleet.offers.why_unready()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, ChatCall.parse, "chatcmpl-")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CompletionCall.parse, "cmpl-")

    async def _serve(
        self, request: web.Request, parse: Callable[[bytearray], Call], prefix: str
    ) -> web.StreamResponse:
        tenant = request[TRAIL].tenant
        assert tenant is not None, "the middleware sets the tenant"
        async with self.intake.bodies.of(request, tenant.name) as body:
            return await self._run_call(request, body, await body.parsed(parse), prefix)

    async def _run_call(
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
        """The placement policy in the request's header, if the settings allow it."""
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
        """Answer the call; `events` is set for a stream. Every failure raises, even after the
        stream has begun. `body` is released once its prompts are ids."""
        assert trail.tenant is not None, "the middleware sets the tenant"
        waits_until = await self.intake.cold_start.hold(call, trail, events)
        serving = self.fleet.offers.choose(call.options.model)
        # Time on hold does not count towards the deadline: a node may load for minutes.
        deadline = self.clock() + self.settings.request_timeout_s
        async with body.turn():
            prepared = await prepare(
                call,
                serving,
                trail.id,
                tenant=trail.tenant,
                deadline=deadline,
                rng=self.rng,
                max_sequences=self.intake.admission.max_call_sequences(trail.tenant_name),
                ranking=ranking,
                traceparent=trail.traceparent,
            )
        call.forget_prompts()
        body.done()
        prompts, created = [item.request.prompt_ids for item in prepared], int(time.time())
        starter = PromptStarter(
            self.intake.admission, self.dispatcher, trail, prepared, waits_until
        )
        guard = SlowClientGuard(starter.fail, events, trail.fail, self.settings.bounds.cut_off_s)
        choices = sum(item.request.params.n for item in prepared)
        output = OutputQueue(len(prepared), guard.max_unread(choices), guard.overflow)
        self.observers.metrics.accepted(map(len, prompts))  # waiting prompts are demand too
        await starter.begin(output, events)
        in_flight = starter.in_flight
        # From here on, await only inside the try, so that a client that leaves ends its requests.
        timer = asyncio.get_running_loop().call_later(
            max(0.0, deadline - self.clock()), self._time_out, guard
        )

        def shape() -> Shape:
            served = in_flight[0].prepared.serving
            common = CommonFields(
                id=prefix + trail.id,
                created=created,
                model=served.name,
                system_fingerprint=served.kind.fingerprint,
            )
            parsing = prepared[0].parsing
            return call.shape(common, prompts, served.model.tokenizer, parsing)

        watch = Stopwatch(self.observers.metrics, self.clock, trail.started)
        trail.answer = answer = Answer(call, shape, in_flight, len(prepared), output, watch)
        try:
            if events is not None:
                return await answer.stream(events)
            return web.Response(body=await answer.whole(), content_type=JSON_TYPE)
        finally:
            timer.cancel()
            output.close()
            guard.done()
            starter.end(answer.usage() if answer.placed else None)

    def _count(self, change: int) -> None:
        self.answering += change
        self.observers.metrics.running.set(self.answering)

    def _time_out(self, guard: SlowClientGuard) -> None:
        limit = self.settings.request_timeout_s
        guard.end(DeadlineExceeded(f"the request did not finish within {limit:g} s").record())


class PromptStarter:
    """Starts the requests of one call. `in_flight` grows until all of `prepared` have started. A
    prompt may wait for its first place until `waits_until`, if given. After begin(), the caller
    must call end()."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        trail: RequestLog,
        prepared: Sequence[Prepared],
        waits_until: float | None,
    ) -> None:
        self.in_flight: list[InFlightRequest] = []
        self._admission = admission
        self._dispatcher = dispatcher
        self._trail = trail
        self._prepared = prepared
        self._waits_until = waits_until
        self._booking: BudgetBooking | None = None
        self._task: asyncio.Task[None] | None = None
        self._output: OutputQueue | None = None

    async def begin(self, output: OutputQueue, events: EventStream | None) -> None:
        """Charge the budget and start the first prompt. Raise RateLimited, InvalidRequest,
        QueueFull, QueueTimeout, Unavailable."""
        self._output = output
        self._booking = await self._admission.charge(self._trail.tenant_name, self._prepared)
        try:
            await self._start(output, events)
        except BaseException:
            self.end(None)
            raise
        if len(self.in_flight) < len(self._prepared):
            self._task = asyncio.create_task(self._start_others(output))

    def fail(self, error: ErrorRecord) -> None:
        """Fail all unfinished requests, including those that still wait."""
        for request in self.in_flight:
            self._dispatcher.cancel(request, error)
        if self._output is not None:
            self._output.fail(error)

    def end(self, usage: Usage | None) -> None:
        """End the call. `usage` is what it used; None if it never had a place."""
        if self._task is not None:
            self._task.cancel()
        for request in self.in_flight:
            self._dispatcher.cancel(request)
        self._admission.end_call(self._trail.tenant_name, usage, self._booking)

    async def _start(self, output: OutputQueue, events: EventStream | None) -> None:
        """Wait for the next prompt's turn; start it, and those that admission lets in with it."""
        begun = len(self.in_flight)
        waiting = self._prepared[begun:]
        tickets = await self._admission.admit(self._trail, waiting, events, begun > 0)
        entered = list(zip(waiting, tickets, strict=False))
        self.in_flight += await self._dispatcher.start(entered, output, begun, self._waits_until)

    async def _start_others(self, output: OutputQueue) -> None:
        try:
            while len(self.in_flight) < len(self._prepared):
                await self._start(output, None)
        except BatonError as refusal:
            output.fail(refusal.record())
        except Exception:
            logger.exception("starting a prompt failed", extra={"request": self._trail.id})
            error = InternalError(
                f"the router failed; its log has the cause under request {self._trail.id}"
            )
            output.fail(error.record())
