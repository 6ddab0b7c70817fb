"""POST /v1/chat/completions and /v1/completions: one call, from its body to its answer.

In: aiohttp requests; the middleware has set their tenant. Out: responses. Errors are raised, and
the middleware in `app` formats them. The first prompt of a call starts before the answer begins,
the others while it is written, as admission lets them in. A call that has begun has no queue
timeout: only its deadline, its client or an error ends it. Its waiting prompts then leave the
queue, and its running ones are cancelled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from baton_protocol.errors import (
    BatonError,
    InvalidRequest,
    Unavailable,
)
from baton_protocol.policies import RANKINGS, Ranking
from baton_router.admission.admission import Admission
from baton_router.admission.cold_start import ColdStart
from baton_router.errors import RequestFailed
from baton_router.http.answer import Answer
from baton_router.http.answer_encoder import AnswerEncoder
from baton_router.http.body_limits import Body, BodyLimits
from baton_router.http.event_stream import EventStream
from baton_router.http.headers import POLICY_HEADER
from baton_router.http.observers import CONTEXT, Observers
from baton_router.http.prompt_starter import PromptStarter
from baton_router.http.stopwatch import Stopwatch
from baton_router.nodes.fleet import Fleet
from baton_router.openai.call import Call
from baton_router.openai.chat import ChatCall
from baton_router.openai.completions import CompletionCall
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
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    def why_unready(self) -> str | None:
        """Why a new call would not be served now; None if it would."""
        if self.draining:
            return "the router is shutting down"
        return None if self.intake.cold_start.enabled else self.fleet.offers.why_unready()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, ChatCall.parse, "chatcmpl-")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CompletionCall.parse, "cmpl-")

    async def _serve(
        self, request: web.Request, parse: Callable[[bytearray], Call], prefix: str
    ) -> web.StreamResponse:
        tenant = request[CONTEXT].tenant
        assert tenant is not None, "the middleware sets the tenant"
        async with self.intake.bodies.of(request, tenant.name) as body:
            return await self._run_call(request, body, await body.parsed(parse), prefix)

    async def _run_call(
        self, request: web.Request, body: Body, call: Call, prefix: str
    ) -> web.StreamResponse:
        if self.draining:
            raise Unavailable("the router is shutting down; send the request again")
        ranking = self._requested_ranking(request)
        stream = call.options.stream
        events = EventStream(request, self.settings.keepalive_s) if stream else None
        self._count_answering(1)
        try:
            return await self._answer_call(request[CONTEXT], body, call, prefix, events, ranking)
        except (BatonError, RequestFailed) as error:
            if events is None or not events.begun:
                raise
            failure = error.record() if isinstance(error, BatonError) else error.error
            request[CONTEXT].failure = failure
            return await events.end_with_error(failure)
        finally:
            self._count_answering(-1)

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

    async def _answer_call(
        self,
        context: RequestContext,
        body: Body,
        call: Call,
        prefix: str,
        events: EventStream | None,
        ranking: Ranking | None,
    ) -> web.StreamResponse:
        """Answer the call; `events` is set for a stream. Every failure raises, even after the
        stream has begun. `body` is released once its prompts are ids."""
        assert context.tenant is not None, "the middleware sets the tenant"
        waits_until = await self.intake.cold_start.hold_call(call, context, events)
        serving = self.fleet.offers.choose(call.options.model)
        # Time on hold does not count towards the deadline: a node may load for minutes.
        deadline = self.clock() + self.settings.request_timeout_s
        async with body.turn():
            prepared = await prepare(
                call,
                serving,
                context.id,
                tenant=context.tenant,
                deadline=deadline,
                rng=self.rng,
                max_sequences=self.intake.admission.max_call_sequences(context.tenant_name),
                ranking=ranking,
                traceparent=context.traceparent,
                shared=self.intake.admission.shared,
            )
        call.forget_prompts()
        body.done()
        context.generates = call.options.generates
        answer = Answer(
            PromptStarter(self.intake.admission, self.dispatcher, context, prepared, waits_until),
            AnswerEncoder(call, prepared, context, prefix + context.id),
            events,
            context=context,
            watch=Stopwatch(self.observers.metrics, self.clock, context),
            settings=self.settings,
            clock=self.clock,
        )
        # Prompts that wait for their turn are demand, too.
        self.observers.metrics.accepted(len(item.request.prompt_ids) for item in prepared)
        return await answer.respond(deadline)

    def _count_answering(self, change: int) -> None:
        self.answering += change
        self.observers.metrics.running.set(self.answering)
