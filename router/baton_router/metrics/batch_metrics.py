"""Metrics of batches: how many are open and run here, how they and their lines ended."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class BatchMetrics:
    """Metrics of batches, in the router's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge(
            "baton_router_batches_open",
            "Batches of the pool that have not ended, as this router last saw them.",
            registry=registry,
        )
        self._running = Gauge(
            "baton_router_batches_running", "Batches that this router runs.", registry=registry
        )
        self._ended = Counter(
            "baton_router_batches_total",
            "Batches that this router ended, by status.",
            ("status",),
            registry=registry,
        )
        self._lines = Counter(
            "baton_router_batch_lines_total",
            "Requests of batches that this router answered, by outcome: completed or failed.",
            ("outcome",),
            registry=registry,
        )

    def watch(self, count_open: Callable[[], int], count_running: Callable[[], int]) -> None:
        """Read these counts whenever the metrics are read."""
        self._open.set_function(count_open)
        self._running.set_function(count_running)

    def ended(self, status: str) -> None:
        self._ended.labels(status).inc()

    def answered(self, succeeded: bool) -> None:
        self._lines.labels("completed" if succeeded else "failed").inc()
