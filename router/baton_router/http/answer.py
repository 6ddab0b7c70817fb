"""The answer to one call, from its first prompt's turn to its last byte.

In: the prompts' starter, and the output that their requests put into the answer's queue. Out: the
HTTP response, an SSE stream or one JSON object. A stream sends its headers with the first token. If
that takes longer than `keepalive_s`, it sends them with a comment line, and another comment after
each such time without a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from baton_protocol.errors import DeadlineExceeded, ErrorRecord, SlowClient
from baton_protocol.link import Delta
from baton_protocol.resume import ResumeHead, may_repeat
from baton_router.http.answer_encoder import AnswerEncoder
from baton_router.http.event_stream import EventStream
from baton_router.http.headers import RESUME_HEADER
from baton_router.http.observers import Observers
from baton_router.http.prompt_starter import PromptStarter
from baton_router.http.stopwatch import Stopwatch
from baton_router.openai.answers import Usage
from baton_router.requests.context import RequestContext
from baton_router.requests.kept_stream import TAKEN, KeptStream, repeats
from baton_router.requests.output_queue import Batch, OutputQueue
from baton_router.settings import RouterSettings

T = TypeVar("T")
# Limit beyond what kernel and transport buffer (some MB). An unread token takes about 0.3 kB.
UNREAD_TOKENS = 4096
LONG_REPLAY = 1024  # deltas; writing their events again takes 5 ms
UNREAD_PER_CHOICE = 64  # all choices of a call produce tokens at once
# How long the headers of a kept stream, which have its id, wait for the first event.
HEADERS_S = 0.1


class Answer:
    """Owns all that runs for one answer: the starter of its prompts, their output, and the timers
    of its deadline and of a slow client. Call stream() or whole() once; they end what is left.

    `events` is the stream that stream() writes; None for an answer in one piece. `kept` is set for
    a stream that can be resumed."""

    def __init__(
        self,
        starter: PromptStarter,
        encoder: AnswerEncoder,
        events: EventStream | None,
        *,
        context: RequestContext,
        observers: Observers,
        settings: RouterSettings,
        clock: Callable[[], float],
        kept: KeptStream | None = None,
    ) -> None:
        self._starter = starter
        self._encoder = encoder
        self._events = events
        self._context = context
        self._watch = Stopwatch(observers.metrics, clock, context)
        self._observers = observers
        self._settings = settings
        self._clock = clock
        self._kept = kept
        self._headers_due = False
        max_unread = None  # an answer in one piece buffers nothing for its client
        if events is not None:
            events.error_event = encoder.error_event
            max_unread = UNREAD_TOKENS + UNREAD_PER_CHOICE * starter.choices
        self._output = OutputQueue(starter.prompts, max_unread, self._on_overflow)
        self._cut_off: asyncio.TimerHandle | None = None

    async def stream(self, deadline: float) -> web.StreamResponse:
        """Start the call and stream its answer. `deadline` is a time of the clock. Every failure
        raises, even after the stream has begun."""
        return await self._run(deadline, self._stream)

    async def whole(self, deadline: float) -> bytes:
        """Start the call; the JSON of its answer in one piece. Every failure raises."""
        return await self._run(deadline, self._collect)

    async def _run(self, deadline: float, answer: Callable[[], Awaitable[T]]) -> T:
        await self._starter.start_first(self._output, self._events)
        # From here on, await only inside the try, so that a client that leaves ends its requests.
        time_left_s = max(0.0, deadline - self._clock())
        timer = asyncio.get_running_loop().call_later(time_left_s, self._time_out)
        self._context.in_flight = self._starter.in_flight
        try:
            return await answer()
        finally:
            timer.cancel()
            self._output.cancel_timers()
            if self._cut_off is not None:
                self._cut_off.cancel()
            usage = self._context.usage() if self._context.attempts else None
            self._starter.end_call(self._charged_usage() if usage is not None else None)
            # Of a stream that was taken, the call that goes on with it counts all.
            if usage is not None and (self._kept is None or self._kept.state != "taken"):
                self._observers.count_tokens(self._context, usage)

    async def _collect(self) -> bytes:
        """The JSON of an answer in one piece. Raise RequestFailed."""
        while batch := await self._next_batch(None):
            self._encoder.collect(batch)
        self._watch.record_end()
        return await self._encoder.encode_whole()

    async def _stream(self) -> web.StreamResponse:
        """Stream the answer. Raise RequestFailed after writing everything before the failure."""
        events = self._events
        assert events is not None, "an answer that streams has a stream"
        if self._kept is not None:
            await self._begin_kept(self._kept, events)
        while True:
            data, more = await self._next_bytes(events)
            if not more:
                self._watch.record_end()
                return await events.end_stream(data)
            await events.write_event(data)
            if self._context.generates:
                self._output.pour = partial(self._pour, events)

    async def _next_bytes(self, events: EventStream) -> tuple[bytes, bool]:
        """The stream's next bytes, possibly empty, and whether more follow."""
        headers_due, self._headers_due = self._headers_due, False
        patience_s = min(HEADERS_S, events.keepalive_s) if headers_due else events.keepalive_s
        try:
            batch = await self._next_batch(patience_s)
        except TimeoutError:
            return b"" if headers_due else events.waiting, True
        kept = self._kept
        if kept is not None:
            data = await self._kept_events(kept, batch)
        else:
            data = await self._encoder.encode(batch) if batch else b""
        if batch and not self._output.over:
            return data, True
        end = await self._encoder.encode_end()
        return data + (end if kept is None else kept.number_last(end)), False

    async def _next_batch(self, patience_s: float | None) -> Batch:
        batch = await self._output.next_batch(patience_s)
        self._watch.record_batch(batch)
        if self._context.generates:
            return batch
        return [(slot, _without_output(delta)) for slot, delta in batch]

    def _pour(self, events: EventStream, batch: Batch) -> bool:
        """Write a batch at once, without waking the handler. False: the handler has to do it."""
        if not events.flows or self._encoder.is_slow(batch):
            return False
        encode, kept = self._encoder.encode_now, self._kept
        data = encode(batch) if kept is None else kept.pour(batch, encode)
        if data is None:
            return False
        self._watch.record_batch(batch)
        events.push_event(data)
        return True

    def _charged_usage(self) -> Usage:
        """The usage of the call. What was used before it resumed a stream was charged then."""
        usage, kept = self._context.usage(), self._kept
        if kept is None or kept.resumed is None:
            return usage
        return Usage.of(prompt=0, completion=usage.completion_tokens - kept.known_tokens)

    # --- a stream that can be resumed -------------------------------------------------------------

    async def _kept_events(self, kept: KeptStream, batch: Batch) -> bytes:
        """The events of a batch, which may be sent, with those that were held."""
        if kept.fresh:
            await kept.begin(self._head_now(kept))
        if not kept.repeatable:
            return await kept.keep(batch, await self._encoder.encode(batch) if batch else b"")
        parts = []
        for item in batch:
            data = await self._encoder.encode([item])
            later = repeats(item[1])
            parts.append(kept.keep_later(item[1], data) if later else await kept.keep([item], data))
        return b"".join(parts)

    async def _begin_kept(self, kept: KeptStream, events: EventStream) -> None:
        """Send the known events. If there are none, the headers leave with the first event, or
        soon, so that the client has the stream's id."""
        kept.on_taken, kept.send = self._end_taken, events.push_if_flowing
        record = self._context.in_flight[0].record
        kept.cached = lambda: record.known_cached_tokens
        known = b""
        if kept.resumed is None:
            await kept.begin(self._head_now(kept))
        else:
            batch: Batch = [(0, delta) for delta in kept.resumed.deltas]
            if len(batch) > LONG_REPLAY or self._encoder.is_slow(batch):
                known = await asyncio.to_thread(self._known_events, kept, batch)
            else:
                known = self._known_events(kept, batch)
        seconds = kept.head.seconds if kept.state == "kept" else 0
        events.commit({RESUME_HEADER: f"{seconds}"})
        self._headers_due = not known
        if known:
            await events.write_event(known)

    def _known_events(self, kept: KeptStream, batch: Batch) -> bytes:
        """What follows the client's last event, of all that is kept. Raise InvalidRequest."""
        encode = self._encoder.encode_now
        if not kept.repeatable:
            return kept.replay(encode(batch) if batch else b"")
        return b"".join([kept.repeat(item[1], encode([item])) for item in batch])

    def _head_now(self, kept: KeptStream) -> ResumeHead:
        """The head as of now: a request without output may get another kind of nodes."""
        [request] = self._context.in_flight
        record, serving = request.record, request.prepared.serving
        most_cached = None
        if record.attempts:
            uncached = record.attempts[0].placement.uncached
            most_cached = len(record.request.prompt_ids) - uncached
        return msgspec.structs.replace(
            kept.head.with_request(record.request),
            kind=serving.kind,
            model=serving.name,
            most_cached=most_cached,
            repeatable=record.exact == "bitwise" and may_repeat(record.request.params),
        )

    def _end_taken(self) -> None:
        self._starter.fail_requests(TAKEN)
        self._output.put_error(TAKEN)

    # --- early ends -------------------------------------------------------------------------------

    def _time_out(self) -> None:
        limit_s = self._settings.request_timeout_s
        error = DeadlineExceeded(f"the request did not finish within {limit_s:g} s")
        self._fail(error.record())

    def _on_overflow(self) -> None:
        """Schedule the end of the call; the dispatcher calls this in the middle of its work."""
        error = SlowClient(
            "the client does not read the stream: more tokens are unread than the router "
            "buffers; read faster, or ask for an answer without `stream`"
        )
        loop = asyncio.get_running_loop()
        if self._kept is not None and self._kept.state == "kept" and self._events is not None:
            loop.call_soon(self._events.abort_connection)  # the client may come back for the rest
        else:
            loop.call_soon(self._fail, error.record())

    def _fail(self, error: ErrorRecord) -> None:
        """Fail the requests and the output. Cut off a client that does not read the error either;
        the context notes the error, as such a client does not see it."""
        self._starter.fail_requests(error)
        self._output.put_error(error)
        if self._events is not None and self._cut_off is None:
            self._context.failure = error
            self._cut_off = asyncio.get_running_loop().call_later(
                self._settings.tunables.cut_off_s, self._events.abort_connection
            )


def _without_output(delta: Delta) -> Delta:
    """The delta without its output, for a call that only asks about its prompt."""
    finish = None if delta.finish is None else "length"
    return msgspec.structs.replace(delta, ids=(), text="", logprobs=(), finish=finish, stop=None)
