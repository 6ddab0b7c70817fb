"""The routes that generate, in every dialect: one call, from its body to its answer.

In: aiohttp requests; the middleware has set their tenant. Out: responses. Errors are raised, and
the middleware in `app` formats them. The first prompt of a call starts before the answer begins,
the others while it is written, as admission lets them in. A call that has begun has no queue
timeout: only its deadline, its client or an error ends it. Its waiting prompts then leave the
queue, and its running ones are cancelled.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from baton_protocol.errors import BatonError, InternalError, InvalidRequest, Unavailable
from baton_protocol.policies import RANKINGS, Ranking
from baton_router.admission.admission import Admission
from baton_router.admission.cold_start import ColdStart
from baton_router.errors import RequestFailed, error_record
from baton_router.http.answer import Answer
from baton_router.http.answer_encoder import AnswerEncoder, Keep
from baton_router.http.body_limits import Body, BodyLimits
from baton_router.http.dialects import DIALECTS
from baton_router.http.event_stream import EventStream, LastingStream, UnreadStream
from baton_router.http.headers import LAST_EVENT_HEADER, POLICY_HEADER
from baton_router.http.media_types import JSON_TYPE
from baton_router.http.observers import CLIENT_LEFT, CONTEXT, Observers
from baton_router.http.prompt_starter import PromptStarter
from baton_router.http.resumes import EVENTS_PATH, Resumes, Wish, last_event
from baton_router.nodes.fleet import Fleet
from baton_router.openai.call import Call
from baton_router.openai.dialect import Dialect
from baton_router.requests.context import RequestContext
from baton_router.requests.detached import DetachedWork
from baton_router.requests.dispatcher import Dispatcher
from baton_router.requests.kept_stream import KeptStream, LastEvent
from baton_router.requests.prepared import Prepared
from baton_router.requests.tokenize import prepare, restore
from baton_router.requests.turns import Turns
from baton_router.responses.call import RESPONSES
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
    resumes: Resumes
    rng: random.Random
    clock: Callable[[], float]
    turns: Turns = field(default_factory=Turns)
    draining: bool = False
    answering: int = 0
    detached: DetachedWork = field(default_factory=DetachedWork)

    def routes(self) -> list[web.RouteDef]:
        """All but that of responses, which may be kept (see `http/responses`)."""
        return [
            *(
                web.post(route, partial(self.serve, dialect))
                for route, dialect in DIALECTS.items()
                if dialect is not RESPONSES
            ),
            web.get(EVENTS_PATH, self.events, allow_head=False),
        ]

    def why_unready(self) -> str | None:
        """Why a new call would not be served now; None if it would."""
        if self.draining:
            return "the router is shutting down"
        return None if self.intake.cold_start.enabled else self.fleet.offers.why_unready()

    async def serve(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        async with self.intake.bodies.of(request, request[CONTEXT].tenant_name) as body:
            if (last := last_event(request)) is not None:
                return await self.resume(request, body, last)
            wish = self.resumes.wish_of(request, dialect.route, body.data)
            return await self.respond(request, body, await body.parsed(dialect.parse), wish=wish)

    async def respond(
        self,
        request: web.Request,
        body: Body,
        call: Call,
        *,
        keep: Keep | None = None,
        wish: Wish | None = None,
    ) -> web.StreamResponse:
        """Answer the call of this body, which is released once its prompts are ids."""
        if self.draining:
            raise Unavailable("the router is shutting down; send the request again")
        self._force_usage(call)
        ranking = self._requested_ranking(request)
        if wish is not None:
            self.resumes.check(call)
            return await self._stream_kept(request, body, call, ranking, wish)
        self._count_answering(1)
        try:
            if call.options.stream:
                return await self._stream(request, body, call, ranking, keep)
            answer, deadline = await self._prepare(
                call, request[CONTEXT], body=body, ranking=ranking, keep=keep
            )
            whole = await answer.whole(deadline)
        finally:
            self._count_answering(-1)
        return web.Response(body=whole, content_type=JSON_TYPE)

    async def _stream(
        self,
        request: web.Request,
        body: Body,
        call: Call,
        ranking: Ranking | None,
        keep: Keep | None,
    ) -> web.StreamResponse:
        """Stream the call's answer. An error after the stream has begun is its last event."""
        context = request[CONTEXT]
        assert context.dialect is not None, "a route that generates has a dialect"
        events = EventStream(request, self.settings.keepalive_s, context.dialect)
        try:
            answer, deadline = await self._prepare(
                call, context, body=body, events=events, ranking=ranking, keep=keep
            )
            return await answer.stream(deadline)
        except (BatonError, RequestFailed) as error:
            if not events.begun:
                raise
            context.failure = error_record(error)
            return await events.end_with_error(context.failure)

    # --- streams that outlive their clients -------------------------------------------------------

    async def _stream_kept(
        self, request: web.Request, body: Body, call: Call, ranking: Ranking | None, wish: Wish
    ) -> web.StreamResponse:
        """Stream the call's answer as _stream() does, and keep it for who resumes it."""
        context = request[CONTEXT]
        assert context.dialect is not None, "a route that generates has a dialect"
        events = LastingStream(request, self.settings.keepalive_s, context.dialect)
        try:
            prepared, waits_until, deadline = await self._get_ready(
                call, context, body=body, events=events, ranking=ranking
            )
            kept = self.resumes.new_stream(wish, prepared)
        except BatonError as error:
            if not events.begun:
                raise
            context.failure = error.record()
            return await events.end_with_error(context.failure)
        answer = self._answer(call, context, prepared, waits_until, events, kept)
        return await self._run_detached(answer, deadline, events, kept, context)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET: the rest of a kept stream, or all of it without Last-Event-ID."""
        id, context = request.match_info["id"], request[CONTEXT]
        seen = last_event(request) or LastEvent(id)
        if seen.stream != id:
            raise InvalidRequest(
                f"{LAST_EVENT_HEADER} names stream {seen.stream}, and the path {id[:40]!r}",
                param=LAST_EVENT_HEADER,
            )
        status = CLIENT_LEFT
        try:
            async with self.intake.bodies.of(request, context.tenant_name) as body:
                response = await self.resume(request, body, seen)
                status = response.status if context.failure is None else context.failure.status
                return response
        except (BatonError, RequestFailed) as error:
            status = error_record(error).status
            raise
        finally:
            if context.dialect is not None:
                self.observers.end_call(context, status, self.clock())

    async def resume(self, request: web.Request, body: Body, seen: LastEvent) -> web.StreamResponse:
        """Send what follows an event of a stream, whichever router began it."""
        body.done()
        context = request[CONTEXT]
        assert context.tenant is not None, "the middleware sets the tenant"
        asked = context.dialect
        head = await self.resumes.find(
            seen.stream, context.tenant.name, None if asked is None else asked.route
        )
        if self.draining:
            raise Unavailable("the router is shutting down; send the request again")
        dialect = self.resumes.dialect_of(head)
        serving = self.fleet.offers.of_kind(head.kind, head.model)
        call = await asyncio.to_thread(dialect.parse, bytearray(head.body))
        self._force_usage(call)
        kept = await self.resumes.claim(head, seen)
        assert kept.resumed is not None, "a claimed stream has a state"
        deadline = self.clock() + self.settings.request_timeout_s
        item = await restore(
            *(call, serving, head, kept.resumed, context.id),
            tenant=context.tenant,
            deadline=deadline,
            ranking=self._requested_ranking(request),
            traceparent=context.traceparent,
        )
        call.forget_prompts()
        if asked is None:
            context.dialect = dialect
            self.observers.begin_call(context, request.headers.get("traceparent", ""))
        events = LastingStream(request, self.settings.keepalive_s, dialect)
        answer = self._answer(call, context, [item], None, events, kept)
        return await self._run_detached(answer, deadline, events, kept, context)

    async def _run_detached(
        self,
        answer: Answer,
        deadline: float,
        events: LastingStream,
        kept: KeptStream,
        context: RequestContext,
    ) -> web.StreamResponse:
        """Run the answer in a task of the router. If the client leaves, it goes on for the time
        that the client asked for."""
        work = self.detached.start(self._finish_kept(answer, deadline, events, kept, context))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            events.left = True
            self._outlive_client(work, kept)
            raise

    def _outlive_client(self, work: asyncio.Task[web.StreamResponse], kept: KeptStream) -> None:
        """End the work after the client's time, or at once if nobody could resume it."""
        if kept.state != "kept":
            work.cancel()
            return

        def end() -> None:
            kept.forget()
            work.cancel()

        kept.on_lost = work.cancel
        timer = asyncio.get_running_loop().call_later(kept.head.seconds, end)
        work.add_done_callback(lambda _: timer.cancel())

    async def _finish_kept(
        self,
        answer: Answer,
        deadline: float,
        events: LastingStream,
        kept: KeptStream,
        context: RequestContext,
    ) -> web.StreamResponse:
        self._count_answering(1)
        try:
            return await answer.stream(deadline)
        except (BatonError, RequestFailed) as error:
            if kept.state == "taken":
                events.abort_connection()
                return await events.end_stream()
            if not events.begun and not events.left:
                raise
            context.failure = record = error_record(error)
            await events.write_event(await kept.keep_error(record, events.error_event(record)))
            return await events.end_stream()
        finally:
            kept.close()
            self._count_answering(-1)

    def _force_usage(self, call: Call) -> None:
        if call.options.stream and self.settings.enable_force_include_usage:
            call.options.add_usage()

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
        self,
        call: Call,
        context: RequestContext,
        keep: Keep | None = None,
        rng: random.Random | None = None,
    ) -> bytes:
        """The JSON of the answer to a call that no HTTP request of its own waits for; nothing for a
        stream, whose call keeps its events. The context has the call's dialect and tenant. `rng`
        draws the seeds that the call does not give. Raise BatonError, RequestFailed."""
        assert context.dialect is not None, "the caller sets the dialect"
        events = None
        if call.options.stream:
            events = UnreadStream(self.settings.keepalive_s, context.dialect)
        self.observers.begin_call(context, "")
        status = InternalError.status
        self._count_answering(1)
        try:
            answer, deadline = await self._prepare(call, context, events=events, keep=keep, rng=rng)
            whole = b""
            if events is None:
                whole = await answer.whole(deadline)
            else:
                await answer.stream(deadline)
            status = 200
        except (BatonError, RequestFailed) as error:
            context.failure = error_record(error)
            status = context.failure.status
            raise
        except asyncio.CancelledError:
            status = CLIENT_LEFT
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
        keep: Keep | None = None,
        rng: random.Random | None = None,
    ) -> tuple[Answer, float]:
        """The call's answer, not yet begun, and its deadline. `events` is set for a stream."""
        prepared, waits_until, deadline = await self._get_ready(
            call, context, body=body, events=events, ranking=ranking, rng=rng
        )
        return self._answer(call, context, prepared, waits_until, events, keep=keep), deadline

    async def _get_ready(
        self,
        call: Call,
        context: RequestContext,
        *,
        body: Body | None,
        events: EventStream | None,
        ranking: Ranking | None,
        rng: random.Random | None = None,
    ) -> tuple[list[Prepared], float | None, float]:
        """The call's requests, until when they may wait for a place, and their deadline. `body` is
        released once its prompts are ids."""
        assert context.tenant is not None, "the middleware sets the tenant"
        waits_until = await self.intake.cold_start.hold_call(call, context, events)
        await self.turns.take()
        serving = self.fleet.offers.choose(call.options.model, call.tasks)
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
        return prepared, waits_until, deadline

    def _answer(
        self,
        call: Call,
        context: RequestContext,
        prepared: list[Prepared],
        waits_until: float | None,
        events: EventStream | None,
        kept: KeptStream | None = None,
        keep: Keep | None = None,
    ) -> Answer:
        assert context.dialect is not None, "a route that generates has a dialect"
        context.generates = call.options.generates
        head = None if kept is None else kept.head
        answer = Answer(
            PromptStarter(self.intake.admission, self.dispatcher, context, prepared, waits_until),
            AnswerEncoder(
                *(context.dialect, call, prepared, context),
                base_id=context.id if head is None else str(head.request.id),
                created=int(time.time()) if head is None else head.created,
                keep=keep,
            ),
            events,
            context=context,
            observers=self.observers,
            settings=self.settings,
            clock=self.clock,
            kept=kept,
        )
        if kept is None or kept.resumed is None:
            # Prompts that wait for their turn are demand, too.
            self.observers.metrics.accepted(len(item.request.prompt_ids) for item in prepared)
        return answer

    def _count_answering(self, change: int) -> None:
        self.answering += change
        self.observers.metrics.running.set(self.answering)
