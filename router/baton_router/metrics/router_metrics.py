"""The router's Prometheus page: its own figures, and its nodes' counters with the label `node`.

In: what the handlers observe, and the pool view at scrape time. Out: the exposition text. The
router re-exports the nodes' counters so that one scrape target shows a whole laptop pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_protocol.link import RequestStats
from baton_protocol.metrics import families_of, metrics_of
from baton_protocol.sampling import FinishReason
from baton_protocol.store import NodeLoad
from baton_router.metrics.demand import DemandCounter
from baton_router.metrics.timings import Timings
from baton_router.nodes.model_grammars import GrammarCounts
from baton_router.nodes.node_view import NodeView, state_of
from baton_router.nodes.pool_view import PoolView
from baton_router.placement.placement import Placement, PredictionError

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120)
NODE_METRICS = metrics_of(NodeLoad)  # by field, with their names on the nodes' own pages
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 4, 10, 100)
ResumeOutcome = Literal["continued", "ended", "not_found"]
COUNTED_S = 0.001  # the ratio of a shorter prediction says nothing


class RouterMetrics:
    """The router's own metrics. Times are in seconds. What concerns demand is also counted for the
    router's load report."""

    def __init__(self, view: PoolView, demand: DemandCounter) -> None:
        self._demand = demand
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "baton_router_requests_total",
            "Answers by endpoint and HTTP status; 499 means that the client left.",
            ("endpoint", "code"),
            registry=self.registry,
        )
        finished = Counter(
            "baton_router_finished_total",
            "Choices that ended, by the reason: stop, or the limit on their length.",
            ("finished_reason",),
            registry=self.registry,
        )
        reasons: tuple[FinishReason, ...] = get_args(FinishReason)
        self._finished = {reason: finished.labels(reason) for reason in reasons}
        self._placements = Counter(
            "baton_router_placements_total",
            "Placed requests by the reason of their placement.",
            ("reason",),
            registry=self.registry,
        )
        self._attempts = self._counter("attempts", "Placements, including repeated ones.")
        self._retries = Counter(
            "baton_router_retries_total",
            "Repeated placements, by the cause that ended the previous attempt.",
            ("cause",),
            registry=self.registry,
        )
        self._resumed = self._counter(
            "resumed_requests", "Streams that continued with a new attempt."
        )
        self._kept_streams = Counter(
            "baton_router_resumed_streams_total",
            "Streams that clients came back for, by outcome: continued, ended before, not_found.",
            ("outcome",),
            registry=self.registry,
        )
        self._kept = self._counter(
            "resumed_tokens", "Tokens that the clients of continued streams had received before."
        )
        self._recomputed = self._counter(
            "recomputed_tokens", "Prompt tokens that repeated attempts computed."
        )
        self._kv = {
            "matched_tokens": self._counter(
                "matched_tokens", "Prompt tokens found in the node's cache or in the store."
            ),
            "fetched_tokens": self._counter(
                "fetched_tokens", "Matched prompt tokens that nodes fetched from the store."
            ),
            "declined_tokens": self._counter(
                "declined_tokens",
                "Matched prompt tokens left in the store because computing them was cheaper.",
            ),
        }
        self._predicted = {
            "fetch_predicted_ms": self._histogram(
                "fetch_predicted", "Predicted seconds to fetch a prompt's stored chunks."
            ),
            "compute_predicted_ms": self._histogram(
                "compute_predicted", "Predicted seconds to compute the same chunks instead."
            ),
        }
        self._fetch = self._histogram(
            "fetch", "Measured seconds to fetch a prompt's stored chunks."
        )
        self._error = Histogram(
            "baton_router_prediction_error_seconds",
            "Absolute difference between predicted and measured time from placement to "
            "the decode node's first token.",
            ("way",),
            buckets=(0.001, 0.002, *_SECONDS),
            registry=self.registry,
        )
        self._ratio = Histogram(
            "baton_router_prediction_ratio",
            "Measured over predicted time to the decode node's first token, for "
            "predictions above 1 ms.",
            ("way",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self.ttft, self.itl = demand.ttft, demand.itl
        self.registry.register(self.ttft)
        self.registry.register(self.itl)
        self.e2e = self._histogram(
            "e2e_request_latency", "Seconds from a request's start to its end."
        )
        self.pause = self._histogram(
            "pause", "Seconds from the last token before a lost attempt to the next token."
        )
        self.queue = self._histogram("queue", "Seconds on a node without fetching or computing.")
        self.handoff = self._histogram(
            "handoff",
            "Seconds from sending the first tokens to the decode node to its own first token.",
        )
        self.running = Gauge(
            "baton_router_requests_running",
            "HTTP requests that are being answered.",
            registry=self.registry,
        )
        self.held = Gauge(
            "baton_router_requests_held",
            "Requests that wait because no node can take them.",
            registry=self.registry,
        )
        self.conflicts = Gauge(
            "baton_router_node_name_conflicts",
            "Nodes that are not used because a newer node has the same name.",
            registry=self.registry,
        )
        tasks = Gauge(
            "baton_asyncio_tasks", "asyncio tasks of this process.", registry=self.registry
        )
        tasks.set_function(lambda: len(asyncio.all_tasks()))
        self.registry.register(NodeFigures(view))

    def count_refused_input(
        self, dropped: Callable[[], int], refused: Callable[[], Mapping[str, int]]
    ) -> None:
        """Add counters of refused input. `dropped`: chunk events that were not applied. `refused`:
        other input from nodes, by reason."""
        self.registry.register(_RefusedInput(dropped, refused))

    def grammars(self, counts: Callable[[], GrammarCounts]) -> None:
        """Add the grammar metrics; `counts` returns the sums over all models."""
        self.registry.register(_GrammarFigures(counts))

    def placed(self, placement: Placement, cause: str | None, tokens: int) -> None:
        """Count a placement. `cause` is None for a first one; `tokens` are those the client has."""
        self._placements.labels(placement.reason).inc()
        self._attempts.inc()
        if cause is None:
            self._demand.placed(placement.uncached)
        else:
            self._retries.labels(cause).inc()
        if tokens:
            self._resumed.inc()
            self._kept.inc(tokens)

    def resumed(self, outcome: ResumeOutcome) -> None:
        """Count a client that came back for its stream."""
        self._kept_streams.labels(outcome).inc()

    def accepted(self, prompts: Iterable[int]) -> None:
        """Count a call's requests. `prompts` holds the tokens of each prompt."""
        self._demand.accepted(prompts)

    def delivered(self, tokens: int) -> None:
        self._demand.delivered(tokens)

    def finished(self, reason: FinishReason) -> None:
        self._finished[reason].inc()

    def measured(self, stats: RequestStats, attempt: int, *, opening: bool) -> None:
        """Record a node's figures. `opening`: these are the first of the attempt."""
        if opening:
            self.queue.observe(stats.queue_ms / 1000)
            self._found(stats)
        if attempt > 1:
            self._recomputed.inc(stats.computed_tokens)

    def missed(self, miss: PredictionError) -> None:
        """Record a prediction and its measured result."""
        self._error.labels(miss.way).observe(abs(miss.measured_s - miss.predicted_s))
        if miss.predicted_s > COUNTED_S:
            self._ratio.labels(miss.way).observe(miss.measured_s / miss.predicted_s)

    def _found(self, stats: RequestStats) -> None:
        """Record the figures of the node that had to have the prompt: prefill, or the only node."""
        for name, counter in self._kv.items():
            counter.inc(getattr(stats, name))
        if stats.fetch_predicted_ms > 0:
            for name, histogram in self._predicted.items():
                histogram.observe(getattr(stats, name) / 1000)
        if stats.fetched_tokens:
            self._fetch.observe(stats.fetch_ms / 1000)

    def answered(self, endpoint: str, code: int) -> None:
        self._requests.labels(endpoint, str(code)).inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"baton_router_{name}_total", help_text, registry=self.registry)

    def _histogram(self, name: str, help_text: str) -> Timings:
        timings = Timings(f"baton_router_{name}_seconds", help_text, _SECONDS)
        self.registry.register(timings)
        return timings


class _RefusedInput(Collector):
    def __init__(
        self, dropped: Callable[[], int], refused: Callable[[], Mapping[str, int]]
    ) -> None:
        self._dropped = dropped
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        help_text = "Chunk events dropped because they came too fast or after a gap."
        name = "baton_router_cache_events_dropped_total"
        yield CounterMetricFamily(name, help_text, value=float(self._dropped()))
        family = CounterMetricFamily(
            "baton_router_node_reports_refused_total",
            "Frames and files of nodes that the router refused because of their size "
            "or an invalid value.",
            labels=("reason",),
        )
        for reason, count in self._refused().items():
            family.add_metric((reason,), float(count))
        yield family


class _GrammarFigures(Collector):
    """Grammars that this router checked for structured output."""

    def __init__(self, counts: Callable[[], GrammarCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        for name, help_text, value in (
            ("compiled_total", "Grammars compiled to check them.", counts.compiled),
            ("hits_total", "Requests whose grammar was already compiled.", counts.hits),
            ("compile_seconds_total", "Seconds spent on compiling grammars.", counts.compile_s),
        ):
            yield CounterMetricFamily(f"baton_router_grammar_{name}", help_text, value=float(value))


class NodeFigures(Collector):
    """Every number of NodeLoad per node: `*_total` as counters, the rest as gauges."""

    def __init__(self, view: PoolView) -> None:
        self._view = view

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to describe at registration, as nodes come later

    def collect(self) -> Iterator[Metric]:
        nodes = list(self._view.nodes.values())
        for fields in families_of(NODE_METRICS).values():
            yield _family(fields, nodes)
        up = GaugeMetricFamily(
            "baton_node_ready", "1 if the node can get requests, else 0.", labels=("node", "role")
        )
        for view in nodes:
            ready = state_of(view) == "ready"
            up.add_metric((view.report.node, view.report.role), float(ready))
        yield up


def _family(fields: Sequence[str], nodes: list[NodeView]) -> Metric:
    """The metric of these fields of NodeLoad, with one sample per field and node."""
    metric, about = NODE_METRICS[fields[0]], f"Node: {fields[0].replace('_', ' ')}."
    labels = ("node", *(key for key, _ in metric.labels))
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.is_counter:
        family = CounterMetricFamily(metric.name, about, labels=labels)
    else:
        family = GaugeMetricFamily(metric.name, about, labels=labels)
    for name in fields:
        more = [value for _, value in NODE_METRICS[name].labels]
        for view in nodes:
            number = float(getattr(view.report.load, name))
            family.add_metric((view.report.node, *more), number)
    return family
