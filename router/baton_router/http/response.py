"""Writes one call's answer: an SSE stream, or one JSON object.

In: the output queue that the call's requests fill. Out: the HTTP response. A stream's headers wait
for the first token. Where that takes long they go with a comment line, and another one follows
whenever no token came for the stream's `keepalive_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import msgspec
from aiohttp import web

from baton_protocol.link import Delta
from baton_router.http.sse import WAITING, EventStream
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.openai.answers import DONE, Usage
from baton_router.openai.endpoint import Call, ChoiceOutput, Shape
from baton_router.requests.in_flight import InFlightRequest
from baton_router.requests.output_queue import Batch, OutputQueue
from baton_router.requests.tokenize import LONG_PROMPT


class Stopwatch:
    """Latencies of one call, from `started` on the given clock. A request that is placed again is
    the same request to its client: it has one first token, and its pause lies between two others.
    """

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float], started: float) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = started
        self._last: dict[tuple[int, int], float] = {}
        self.ttft_s: float | None = None

    def saw(self, batch: Batch) -> None:
        now, last, tokens = self._clock(), self._last, 0
        later = self._metrics.itl.observe
        for slot, delta in batch:
            if not delta.ids:
                continue
            tokens += len(delta.ids)
            key = (slot, delta.choice)
            before = last.get(key)
            if before is not None:
                later(now - before)
            elif self.ttft_s is None:
                self.ttft_s = now - self._started
                self._metrics.ttft.observe(self.ttft_s)
            last[key] = now
        self._metrics.delivered(tokens)

    def ended(self) -> None:
        self._metrics.e2e.observe(self._clock() - self._started)


class Answer:
    """One call that has begun: `in_flight` grows until all its `prompts` run."""

    def __init__(
        self,
        call: Call,
        shape: Callable[[], Shape],
        in_flight: Sequence[InFlightRequest],
        prompts: int,
        output: OutputQueue,
        watch: Stopwatch,
    ) -> None:
        self._options = call.options
        self._make_shape = shape
        self.in_flight = in_flight
        self._prompts = prompts
        self._output = output
        self.watch = watch
        params = in_flight[0].record.request.params
        self._n = params.n
        self._scored = params.prompt_logprobs is not None

    @cached_property
    def _shape(self) -> Shape:
        """Not before there is something to show: until then a request may change its model."""
        return self._make_shape()

    async def whole(self) -> bytes:
        """The JSON of an answer in one piece. Raise RequestFailed."""
        choices = [ChoiceOutput() for _ in range(self._n * self._prompts)]
        while batch := await self._next(None):
            for slot, delta in batch:
                choices[slot * self._n + delta.choice].add(delta)
        self.watch.ended()
        usage = self.usage()
        scored = any(choice.logprobs or choice.prompt_logprobs for choice in choices)
        if scored or self._shapes_slowly():
            return await asyncio.to_thread(lambda: self._shape.answer(choices, usage))
        return self._shape.answer(choices, usage)

    async def stream(self, events: EventStream) -> web.StreamResponse:
        """Raise RequestFailed; whatever came before it is written."""
        while True:
            data, going = await self._part(events.keepalive_s)
            if not going:
                self.watch.ended()
                return await events.end(data)
            await events.write(data)
            if self._options.generates:
                self._output.pour = partial(self._pour, events)

    @property
    def placed(self) -> bool:
        """Whether a node ever got any of it."""
        return any(request.record.attempt > 0 for request in self.in_flight)

    @property
    def ttft_s(self) -> float | None:
        return self.watch.ttft_s

    def usage(self) -> Usage:
        """So far; at the end, of the whole call."""
        records = [request.record for request in self.in_flight]
        generated = sum(len(ids) for record in records for ids in record.outputs)
        return Usage.of(
            prompt=sum(len(record.request.prompt_ids) for record in records),
            completion=generated if self._options.generates else 0,
            cached=sum(record.cached_tokens for record in records),
        )

    def _pour(self, events: EventStream, batch: Batch) -> bool:
        if not events.flows or self._slow(batch):
            return False
        self.watch.saw(batch)
        events.push(self._told(batch))
        return True

    async def _part(self, keepalive_s: float) -> tuple[bytes, bool]:
        """The stream's next bytes, maybe none, and whether more follow."""
        try:
            batch = await self._next(keepalive_s)
        except TimeoutError:
            return WAITING, True
        data = b""
        if batch:
            if self._slow(batch):
                data = await asyncio.to_thread(self._told, batch)
            else:
                data = self._told(batch)
            if not self._output.over:
                return data, True
        usage = self._shape.usage_event(self.usage()) if self._options.include_usage else b""
        return data + usage + DONE, False

    async def _next(self, patience_s: float | None) -> Batch:
        batch = await self._output.next(patience_s)
        self.watch.saw(batch)
        if self._options.generates:
            return batch
        return [(slot, _without_output(delta)) for slot, delta in batch]

    def _slow(self, batch: Batch) -> bool:
        """A long prompt's log-probabilities take half a second: a thread's, not other streams'."""
        if self._scored and any(delta.prompt_logprobs for _, delta in batch):
            return True
        return self._shapes_slowly()

    def _shapes_slowly(self) -> bool:
        """Whether the shape is still to be made, of long prompts: the text of 100,000 ids that are
        echoed takes 0.1 s."""
        if "_shape" in self.__dict__:
            return False
        return (
            sum(len(request.record.request.prompt_ids) for request in self.in_flight) > LONG_PROMPT
        )

    def _told(self, batch: Batch) -> bytes:
        shape, n = self._shape, self._n
        return b"".join([shape.event(slot * n + delta.choice, delta) for slot, delta in batch])


def _without_output(delta: Delta) -> Delta:
    """Of a request that only asks about its prompt: the token that nodes need is not shown."""
    finish = None if delta.finish is None else "length"
    return msgspec.structs.replace(delta, ids=(), text="", logprobs=(), finish=finish, stop=None)
