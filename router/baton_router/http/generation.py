"""The routes that generate, in every dialect: one call, from its body to its answer.

In: aiohttp requests; the middleware has set their tenant. Out: responses. Errors are raised, and
the middleware in `app` formats them. The first prompt of a call starts before the answer begins,
the others while it is written, as admission lets them in. A call that has begun has no queue
timeout: only its deadline, its client or an error ends it. Its waiting prompts then leave the
queue, and its running ones are cancelled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from baton_protocol.errors import BatonError, InternalError, InvalidRequest, Unavailable
from baton_protocol.policies import RANKINGS, Ranking
from baton_router.admission.admission import Admission
from baton_router.admission.cold_start import ColdStart
from baton_router.errors import RequestFailed, error_record
from baton_router.http.answer import Answer
from baton_router.http.answer_encoder import AnswerEncoder
from baton_router.http.body_limits import Body, BodyLimits
from baton_router.http.dialects import DIALECTS
from baton_router.http.event_stream import EventStream
from baton_router.http.headers import POLICY_HEADER
from baton_router.http.media_types import JSON_TYPE
from baton_router.http.observers import CONTEXT, Observers
from baton_router.http.prompt_starter import PromptStarter
from baton_router.http.stopwatch import Stopwatch
from baton_router.nodes.fleet import Fleet
from baton_router.openai.call import Call
from baton_router.openai.dialect import Dialect
from baton_router.requests.context import RequestContext
from baton_router.requests.dispatcher import Dispatcher
from baton_router.requests.tokenize import prepare
from baton_router.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """The stages before placement: reading the body, cold start, admission."""

    bodies: BodyLimits
    cold_start: ColdStart
    admission: Admission


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
            web.post(route, partial(self.serve, dialect)) for route, dialect in DIALECTS.items()
        ]

    def why_unready(self) -> str | None:
        """Why a new call would not be served now; None if it would."""
        if self.draining:
            return "the router is shutting down"
        return None if self.intake.cold_start.enabled else self.fleet.offers.why_unready()

    async def serve(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        context = request[CONTEXT]
        assert context.tenant is not None, "the middleware sets the tenant"
        async with self.intake.bodies.of(request, context.tenant.name) as body:
            call = await body.parsed(dialect.parse)
            if self.draining:
                raise Unavailable("the router is shutting down; send the request again")
            ranking = self._requested_ranking(request)
            self._count_answering(1)
            try:
                if call.options.stream:
                    return await self._stream(request, body, call, ranking)
                answer, deadline = await self._prepare(call, context, body=body, ranking=ranking)
                whole = await answer.whole(deadline)
            finally:
                self._count_answering(-1)
        return web.Response(body=whole, content_type=JSON_TYPE)

    async def _stream(
        self, request: web.Request, body: Body, call: Call, ranking: Ranking | None
    ) -> web.StreamResponse:
        """Stream the call's answer. An error after the stream has begun is its last event."""
        context = request[CONTEXT]
        assert context.dialect is not None, "a route that generates has a dialect"
        events = EventStream(request, self.settings.keepalive_s, context.dialect.error_event)
        try:
            answer, deadline = await self._prepare(
                call, context, body=body, events=events, ranking=ranking
            )
            return await answer.stream(deadline)
        except (BatonError, RequestFailed) as error:
            if not events.begun:
                raise
            context.failure = error_record(error)
            return await events.end_with_error(context.failure)

    def _requested_ranking(self, request: web.Request) -> Ranking | None:
        """The placement policy in the request's header, if the settings allow it."""
        header = request.headers.get(POLICY_HEADER)
        if header is None or not self.settings.allow_policy_header:
            return None
        for ranking in RANKINGS:
            if header == ranking:
                return ranking
        rankings = ", ".join(RANKINGS)
        raise InvalidRequest(f"{POLICY_HEADER} is {header!r}; use {rankings}", param=POLICY_HEADER)

    async def ask(
        self, call: Call, context: RequestContext, rng: random.Random | None = None
    ) -> bytes:
        """The JSON of the answer to a call that no HTTP request of its own waits for. The context
        has the call's dialect and tenant. `rng` draws the seeds that the call does not give. Raise
        BatonError, RequestFailed."""
        self.observers.begin_call(context, "")
        status = InternalError.status
        self._count_answering(1)
        try:
            answer, deadline = await self._prepare(call, context, rng=rng)
            whole = await answer.whole(deadline)
            status = 200
        except (BatonError, RequestFailed) as error:
            context.failure = error_record(error)
            status = context.failure.status
            raise
        finally:
            self._count_answering(-1)
            self.observers.end_call(context, status, self.clock())
        return whole

    async def _prepare(
        self,
        call: Call,
        context: RequestContext,
        *,
        body: Body | None = None,
        events: EventStream | None = None,
        ranking: Ranking | None = None,
        rng: random.Random | None = None,
    ) -> tuple[Answer, float]:
        """The call's answer, not yet begun, and its deadline. `events` is set for a stream. `body`
        is released once its prompts are ids."""
        assert context.tenant is not None, "the middleware sets the tenant"
        assert context.dialect is not None, "a route that generates has a dialect"
        waits_until = await self.intake.cold_start.hold_call(call, context, events)
        serving = self.fleet.offers.choose(call.options.model)
        # Time on hold does not count towards the deadline: a node may load for minutes.
        deadline = self.clock() + self.settings.request_timeout_s
        async with body.turn() if body is not None else nullcontext():
            prepared = await prepare(
                call,
                serving,
                context.id,
                tenant=context.tenant,
                deadline=deadline,
                rng=rng or self.rng,
                max_sequences=self.intake.admission.max_call_sequences(context.tenant_name),
                ranking=ranking,
                traceparent=context.traceparent,
                shared=self.intake.admission.shared,
                background=context.background,
            )
        call.forget_prompts()
        if body is not None:
            body.done()
        context.generates = call.options.generates
        answer = Answer(
            PromptStarter(self.intake.admission, self.dispatcher, context, prepared, waits_until),
            AnswerEncoder(context.dialect, call, prepared, context),
            events,
            context=context,
            watch=Stopwatch(self.observers.metrics, self.clock, context),
            settings=self.settings,
            clock=self.clock,
        )
        # Prompts that wait for their turn are demand, too.
        self.observers.metrics.accepted(len(item.request.prompt_ids) for item in prepared)
        return answer, deadline

    def _count_answering(self, change: int) -> None:
        self.answering += change
        self.observers.metrics.running.set(self.answering)
