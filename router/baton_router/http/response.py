"""Writes the answer to one call: an SSE stream or one JSON object.

In: the output queue that the call's requests fill. Out: the HTTP response. A stream sends its
headers with the first token. If that takes longer than `keepalive_s`, it sends them with a comment
line, and another comment after each such time without a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property, partial

import msgspec
from aiohttp import web

from baton_protocol.errors import ErrorRecord, SlowClient
from baton_protocol.link import Delta
from baton_router.http.event_stream import WAITING, EventStream
from baton_router.http.stopwatch import Stopwatch
from baton_router.openai.answers import DONE, CompletionTokensDetails, Usage
from baton_router.openai.endpoint import Call, ChoiceOutput, Shape
from baton_router.requests.context import RequestContext
from baton_router.requests.output_queue import Batch, OutputQueue
from baton_router.requests.tokenize import LONG_PROMPT

# Limit beyond what kernel and transport buffer (some MB). An unread token takes about 0.3 kB.
UNREAD_TOKENS = 4096
UNREAD_PER_CHOICE = 64  # all choices of a call produce tokens at once


class SlowClientGuard:
    """Ends one call whose client reads too slowly. `fail` gets the error. `events` is None for an
    answer in one piece, which buffers nothing for its client. `note` also gets the error, as the
    client may be cut off before reading it. `cut_off_s`: seconds from the error to the cut."""

    def __init__(
        self,
        fail: Callable[[ErrorRecord], None],
        events: EventStream | None,
        note: Callable[[ErrorRecord], None],
        cut_off_s: float,
    ) -> None:
        self._fail = fail
        self._events = events
        self._note = note
        self._cut_off_s = cut_off_s
        self._cut: asyncio.TimerHandle | None = None

    def max_unread(self, choices: int) -> int | None:
        """The limit of unread tokens for an answer with this many choices; None: no limit."""
        if self._events is None:
            return None
        return UNREAD_TOKENS + UNREAD_PER_CHOICE * choices

    def overflow(self) -> None:
        """Schedule the end of the call; the dispatcher calls this in the middle of its work."""
        error = SlowClient(
            "the client does not read the stream: more tokens are unread than the router "
            "buffers; read faster, or ask for an answer without `stream`"
        )
        asyncio.get_running_loop().call_soon(self.end, error.record())

    def end(self, error: ErrorRecord) -> None:
        self._fail(error)
        if self._events is not None and self._cut is None:
            loop = asyncio.get_running_loop()
            self._note(error)
            self._cut = loop.call_later(self._cut_off_s, self._events.abort)

    def done(self) -> None:
        """The handler has finished: cancel the cut."""
        if self._cut is not None:
            self._cut.cancel()


class Answer:
    """The answer to one call that has begun. `in_flight` grows until all its `prompts` run."""

    def __init__(
        self,
        call: Call,
        shape: Callable[[], Shape],
        context: RequestContext,
        prompts: int,
        output: OutputQueue,
        watch: Stopwatch,
    ) -> None:
        self._options = call.options
        self._make_shape = shape
        self._context = context
        self.in_flight = context.in_flight
        self._prompts = prompts
        self._output = output
        self.watch = watch
        params = self.in_flight[0].record.request.params
        self._n = params.n
        self._scored = params.prompt_logprobs is not None

    @cached_property
    def _shape(self) -> Shape:
        """Created at the first output, because until then a request may switch its model."""
        return self._make_shape()

    async def whole(self) -> bytes:
        """The JSON of an answer in one piece. Raise RequestFailed."""
        choices = [ChoiceOutput() for _ in range(self._n * self._prompts)]
        while batch := await self._next(None):
            for slot, delta in batch:
                choices[slot * self._n + delta.choice].add(delta)
        self.watch.ended()
        usage = await self._whole_usage()
        scored = any(choice.logprobs or choice.prompt_logprobs for choice in choices)
        if scored or self._shape_is_slow():
            return await asyncio.to_thread(lambda: self._shape.answer(choices, usage))
        return self._shape.answer(choices, usage)

    async def stream(self, events: EventStream) -> web.StreamResponse:
        """Stream the answer. Raise RequestFailed after writing everything before the failure."""
        while True:
            data, more = await self._next_bytes(events.keepalive_s)
            if not more:
                self.watch.ended()
                return await events.end(data)
            await events.write(data)
            if self._options.generates:
                self._output.pour = partial(self._pour, events)

    async def _whole_usage(self) -> Usage:
        """Final usage, with reasoning tokens if the model's reasoning is separated."""
        usage, prepared = self._context.usage(), self.in_flight[0].prepared
        parsing = prepared.parsing
        if parsing is None:
            return usage
        choices = [ids for request in self.in_flight for ids in request.record.outputs]
        count = partial(
            parsing.reasoning_tokens,
            prepared.serving.model.tokenizer,
            choices,
            skip_special=prepared.request.params.skip_special_tokens,
        )
        long = sum(map(len, choices)) > LONG_PROMPT
        reasoning_tokens = await asyncio.to_thread(count) if long else count()
        if reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(
                reasoning_tokens=reasoning_tokens
            )
        return usage

    def _pour(self, events: EventStream, batch: Batch) -> bool:
        if not events.flows or self._slow(batch):
            return False
        self.watch.record(batch)
        events.push(self._encode(batch))
        return True

    async def _next_bytes(self, keepalive_s: float) -> tuple[bytes, bool]:
        """The stream's next bytes, possibly empty, and whether more follow."""
        try:
            batch = await self._next(keepalive_s)
        except TimeoutError:
            return WAITING, True
        data = b""
        if batch:
            if self._slow(batch):
                data = await asyncio.to_thread(self._encode, batch)
            else:
                data = self._encode(batch)
            if not self._output.over:
                return data, True
        usage = b""
        if self._options.include_usage:
            usage = self._shape.usage_event(await self._whole_usage())
        return data + usage + DONE, False

    async def _next(self, patience_s: float | None) -> Batch:
        batch = await self._output.next(patience_s)
        self.watch.record(batch)
        if self._options.generates:
            return batch
        return [(slot, _without_output(delta)) for slot, delta in batch]

    def _slow(self, batch: Batch) -> bool:
        """Whether to encode in a thread: a long prompt's logprobs take half a second."""
        if self._scored and any(delta.prompt_logprobs for _, delta in batch):
            return True
        return self._shape_is_slow()

    def _shape_is_slow(self) -> bool:
        """Whether the shape must still be made from long prompts: echoing the text of 100,000 ids
        takes 0.1 s."""
        if "_shape" in self.__dict__:
            return False
        return (
            sum(len(request.record.request.prompt_ids) for request in self.in_flight) > LONG_PROMPT
        )

    def _encode(self, batch: Batch) -> bytes:
        shape, n = self._shape, self._n
        return b"".join([shape.event(slot * n + delta.choice, delta) for slot, delta in batch])


def _without_output(delta: Delta) -> Delta:
    """The delta without its output, for a call that only asks about its prompt."""
    finish = None if delta.finish is None else "length"
    return msgspec.structs.replace(delta, ids=(), text="", logprobs=(), finish=finish, stop=None)
