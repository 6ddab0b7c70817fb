"""A node's spans: one per job that a traced request has here, told when the job is over.

In: jobs that end. Out: spans for the sink, with the times and counts that were measured anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton_node.server.request_stream import RequestStream
from baton_protocol.ids import NodeId
from baton_protocol.link import JobFailed
from baton_protocol.traces import Attribute, Sink, Span, begin


class NodeSpans:
    """`wall` is in Unix seconds; `clock` is what jobs are opened by."""

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

    def ended(self, live: RequestStream, *, aborted: bool = False) -> None:
        """No effect for a request that is not traced. `aborted`: its router wanted no more of it,
        which is no error of the node's."""
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
                attributes=self._told(live, aborted),
            )
        )

    def _told(self, live: RequestStream, aborted: bool) -> dict[str, Attribute]:
        told: dict[str, Attribute] = {
            "baton.request": live.id,
            "baton.attempt": live.attempt,
            "baton.node": self._node,
            "baton.aborted": aborted,
        }
        if (stats := live.stats) is not None:
            told |= {
                "baton.handoff_ms": stats.handoff_ms,
                "baton.queue_ms": stats.queue_ms,
                "baton.fetch_ms": stats.fetch_ms,
                "baton.prefill_ms": stats.prefill_ms,
                "baton.prompt_tokens": stats.prompt_tokens,
                "baton.cached_tokens": stats.cached_tokens,
                "baton.host_tokens": stats.host_tokens,
                "baton.fetched_tokens": stats.fetched_tokens,
                "baton.computed_tokens": stats.computed_tokens,
            }
        return told
