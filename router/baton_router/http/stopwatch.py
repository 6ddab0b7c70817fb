"""Measures the latencies of one call.

In: batches of deltas as they are written. Out: the metrics of first tokens, gaps, ends of choices
and whole answers, and the context's time to the first token.
"""

from __future__ import annotations

from collections.abc import Callable

from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.requests.context import RequestContext
from baton_router.requests.output_queue import Batch


class Stopwatch:
    """Latencies of one call by the clock of its context. To the client, a request that is
    placed again stays one request: it has one first token, and the pause is a gap between tokens.
    """

    def __init__(
        self, metrics: RouterMetrics, clock: Callable[[], float], context: RequestContext
    ) -> None:
        self._metrics = metrics
        self._observe_gap = metrics.itl.observe
        self._clock = clock
        self._context = context
        self._last: dict[tuple[int, int], float] = {}

    def record_batch(self, batch: Batch) -> None:
        now, last, tokens = self._clock(), self._last, 0
        for slot, delta in batch:
            if delta.finish is not None:
                self._metrics.finished(delta.finish)
            if not delta.ids:
                continue
            tokens += len(delta.ids)
            key = (slot, delta.choice)
            previous = last.get(key)
            if previous is not None:
                self._observe_gap(now - previous)
            elif self._context.ttft_s is None:
                self._context.ttft_s = ttft_s = now - self._context.started
                if not self._context.background:  # it may wait for hours, and nobody minds
                    self._metrics.ttft.observe(ttft_s)
            last[key] = now
        self._metrics.delivered(tokens)

    def record_end(self) -> None:
        self._metrics.e2e.observe(self._clock() - self._context.started)
