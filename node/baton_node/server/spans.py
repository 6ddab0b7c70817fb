"""A node's trace spans: one for each job of a traced request, created when the job ends.

In: jobs that end. Out: spans for the sink, with the times and counts of the job's RequestStats.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton_node.server.request_stream import RequestStream
from baton_protocol.ids import NodeId
from baton_protocol.link import JobFailed
from baton_protocol.traces import Attribute, Sink, Span, begin


class NodeSpans:
    """`wall` is in Unix seconds. `clock` is the clock of RequestStream.opened, in seconds."""

    def __init__(
        self,
        sink: Sink,
        node: NodeId,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sink = sink
        self._node = node
        self._clock = clock
        self._wall = wall

    def record_span(self, live: RequestStream, *, aborted: bool = False) -> None:
        """Record the span of a job that has ended; do nothing if its request is not traced.
        `aborted` jobs were given up before their end and do not count as errors."""
        if not live.request.traceparent:
            return
        place = begin(live.request.traceparent)
        if place is None:
            return
        now = self._wall()
        start = now - (self._clock() - live.opened)
        failed = live.last.error.code if isinstance(live.last, JobFailed) else ""
        self._sink(
            Span(
                "prefill" if live.prefill else "decode",
                place,
                round(start * 1e9),
                round(now * 1e9),
                served=True,
                error=failed,
                attributes=self._attributes(live, aborted),
            )
        )

    def _attributes(self, live: RequestStream, aborted: bool) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {
            "baton.request": live.id,
            "baton.attempt": live.attempt,
            "baton.node": self._node,
            "baton.aborted": aborted,
        }
        if (stats := live.stats) is not None:
            attributes |= {
                "baton.handoff_ms": stats.handoff_ms,
                "baton.queue_ms": stats.queue_ms,
                "baton.fetch_ms": stats.fetch_ms,
                "baton.prefill_ms": stats.prefill_ms,
                "baton.prompt_tokens": stats.prompt_tokens,
                "baton.cached_tokens": stats.cached_tokens,
                "baton.host_tokens": stats.host_tokens,
                "baton.fetched_tokens": stats.fetched_tokens,
                "baton.computed_tokens": stats.computed_tokens,
                "baton.drafted_tokens": stats.drafted_tokens,
                "baton.accepted_drafts": stats.accepted_drafts,
            }
        return attributes
