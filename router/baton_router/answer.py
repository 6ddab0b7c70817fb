"""Writes one call's answer: an SSE stream, or one JSON object.

In: the outbox that the call's requests fill. Out: the HTTP response. Headers wait for the first
token, so that what goes wrong before it is an HTTP status that clients understand; later errors
are an SSE event, and the stream ends without [DONE].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from aiohttp import web

from baton_protocol.errors import ErrorRecord, openai_body
from baton_router.calls import DONE, Call, Gathered, Shape, Usage
from baton_router.dispatch import Flight
from baton_router.errors import RequestFailed
from baton_router.metrics import RouterMetrics
from baton_router.outbox import Batch, Outbox

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect tokens
}


class Stopwatch:
    """Latencies of one call, from `started` on the given clock."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float], started: float) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = started
        self._last: dict[tuple[int, int], float] = {}

    def saw(self, batch: Batch) -> None:
        now = self._clock()
        for slot, delta in batch:
            if not delta.ids:
                continue
            key = (slot, delta.choice)
            if key in self._last:
                self._metrics.itl.observe(now - self._last[key])
            elif not self._last:
                self._metrics.ttft.observe(now - self._started)
            self._last[key] = now

    def ended(self) -> None:
        self._metrics.e2e.observe(self._clock() - self._started)


class Answer:
    """One call that has been placed."""

    def __init__(
        self, call: Call, shape: Shape, flights: Sequence[Flight], outbox: Outbox, watch: Stopwatch
    ) -> None:
        self._call = call
        self._shape = shape
        self._flights = flights
        self._outbox = outbox
        self._watch = watch
        self._n = flights[0].record.request.params.n
        self.failure: ErrorRecord | None = None  # of a stream whose status was sent already

    async def whole(self) -> bytes:
        """The JSON of an answer in one piece. Raise RequestFailed."""
        choices = [Gathered() for _ in range(self._n * len(self._flights))]
        while batch := await self._outbox.next():
            self._watch.saw(batch)
            for slot, delta in batch:
                choices[slot * self._n + delta.choice].add(delta)
        self._watch.ended()
        return self._shape.answer(choices, self._usage())

    async def stream(self, request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
        """Raise RequestFailed only before the first byte."""
        batch = await self._outbox.next()
        response = web.StreamResponse(headers={**STREAM_HEADERS, **headers})
        await response.prepare(request)
        try:
            while batch:
                self._watch.saw(batch)
                data = b"".join(
                    self._shape.event(slot * self._n + delta.choice, delta) for slot, delta in batch
                )
                if data:
                    await response.write(data)
                batch = await self._outbox.next()
        except RequestFailed as failed:
            self.failure = failed.error
            event = msgspec.json.encode(openai_body(failed.error))
            await response.write(b"data: " + event + b"\n\n")
        else:
            usage = self._call.options.include_usage
            end = self._shape.usage_event(self._usage()) + DONE if usage else DONE
            await response.write(end)
            self._watch.ended()
        await response.write_eof()
        return response

    def _usage(self) -> Usage:
        records = [flight.record for flight in self._flights]
        return Usage(
            prompt=sum(len(record.request.prompt_ids) for record in records),
            completion=sum(len(ids) for record in records for ids in record.outputs),
            cached=sum(record.cached_tokens for record in records),
        )
