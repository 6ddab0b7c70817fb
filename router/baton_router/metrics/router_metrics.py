"""Prometheus page of the router: its own figures, and its nodes' counters by label `node`.

In: what the handlers observe; the pool view at scrape time. Out: the exposition text. Nodes'
counters are re-exported so that one scrape target shows a laptop pool whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_protocol.link import RequestStats
from baton_router.metrics.demand import Demand
from baton_router.metrics.histograms import Timings
from baton_router.nodes.pool_view import LOAD_NUMBERS, NodeView, PoolView, state_of
from baton_router.placement.policy import Placement, PredictionError

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120)
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 4, 10, 100)
COUNTED_S = 0.001  # of less, a share says nothing

# NodeLoad's fields under the names that the nodes' own /metrics pages give them.
_PUBLIC = {
    "published_bytes_total": "baton_kv_published_bytes_total",
    "published_chunks_total": "baton_kv_published_chunks_total",
    "announced_chunks_total": "baton_kv_announced_chunks_total",
    "fetched_bytes_total": "baton_kv_fetched_bytes_total",
    "fetched_chunks_total": "baton_kv_fetched_chunks_total",
    "reused_chunks_total": "baton_kv_chunks_reused_total",
    "lost_chunks_total": "baton_kv_chunks_lost_total",
    "queried_blocks_total": "baton_kv_blocks_queried_total",
    "matched_blocks_total": "baton_kv_blocks_matched_total",
    "fetched_blocks_total": "baton_kv_blocks_fetched_total",
    "used_blocks_total": "baton_kv_blocks_used_total",
    "declined_blocks_total": "baton_kv_blocks_declined_total",
    "host_stored_blocks_total": "baton_kv_host_blocks_stored_total",
    "host_loaded_blocks_total": "baton_kv_host_blocks_loaded_total",
    "host_evicted_blocks_total": "baton_kv_host_blocks_evicted_total",
    "behind_chunks_total": "baton_kv_behind_chunks_total",
    "behind_bytes_total": "baton_kv_behind_bytes_total",
    "behind_skipped_total": "baton_kv_behind_skipped_total",
    "computed_prompt_tokens_total": "baton_prompt_tokens_computed_total",
    "cached_prompt_tokens_total": "baton_prompt_tokens_cached_total",
    "host_prompt_tokens_total": "baton_prompt_tokens_host_total",
    "fetched_prompt_tokens_total": "baton_prompt_tokens_fetched_total",
    "jobs_total": "baton_jobs_total",
    "requests": "baton_requests",
    "waiting": "baton_requests_waiting",
    "running": "baton_requests_running",
    "parked": "baton_requests_parked",
    "free_blocks": "baton_kv_blocks_free",
    "cached_blocks": "baton_kv_blocks_cached",
    "total_blocks": "baton_kv_blocks",
    "host_blocks": "baton_kv_host_blocks_held",
    "host_bytes": "baton_kv_host_bytes_held",
    "host_total_blocks": "baton_kv_host_blocks",
}


class RouterMetrics:
    """The router's own. Times are seconds since the request's first byte was read. What is told of
    demand is counted for the router's report too."""

    def __init__(self, view: PoolView, demand: Demand) -> None:
        self._demand = demand
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "baton_router_requests_total",
            "Answers by endpoint and HTTP status; 499 is a client that left.",
            ("endpoint", "code"),
            registry=self.registry,
        )
        self._placements = Counter(
            "baton_router_placements_total",
            "Placed requests by the reason of their placement.",
            ("reason",),
            registry=self.registry,
        )
        self._attempts = self._counter("attempts", "Placements, first ones and later ones.")
        self._retries = Counter(
            "baton_router_retries_total",
            "Requests placed again by what ended the attempt before.",
            ("cause",),
            registry=self.registry,
        )
        self._resumed = self._counter(
            "resumed_requests", "Streams that went on with a new attempt."
        )
        self._kept = self._counter("resumed_tokens", "Tokens their clients had by then.")
        self._recomputed = self._counter(
            "recomputed_tokens", "Prompt tokens that later attempts computed."
        )
        self._kv = {
            "matched_tokens": self._counter(
                "matched_tokens", "Prompt tokens found in their node's cache or in the store."
            ),
            "fetched_tokens": self._counter("fetched_tokens", "Of those, brought from the store."),
            "declined_tokens": self._counter(
                "declined_tokens", "Of those, left in the store: cheaper to compute."
            ),
        }
        self._predicted = {
            "fetch_predicted_ms": self._histogram(
                "fetch_predicted", "What fetching was predicted to take, where it was a choice."
            ),
            "compute_predicted_ms": self._histogram(
                "compute_predicted", "What computing the same was predicted to take."
            ),
        }
        self._fetch = self._histogram("fetch", "What fetching then took.")
        self._error = Histogram(
            "baton_router_prediction_error_seconds",
            "From placement to the decode node's first token: measured minus predicted, absolute.",
            ("way",),
            buckets=(0.001, 0.002, *_SECONDS),
            registry=self.registry,
        )
        self._ratio = Histogram(
            "baton_router_prediction_ratio",
            "The same: measured over predicted, of predictions above a millisecond.",
            ("way",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self.ttft, self.itl = demand.ttft, demand.itl
        self.registry.register(self.ttft)
        self.registry.register(self.itl)
        self.e2e = self._histogram("e2e_request_latency", "Request to its end.")
        self.pause = self._histogram("pause", "Last token before a loss to the next one.")
        self.queue = self._histogram("queue", "On a node, neither fetching nor computing.")
        self.handoff = self._histogram("handoff", "First token told to the decode node's own.")
        self.running = Gauge(
            "baton_router_requests_running",
            "HTTP requests being answered by nodes.",
            registry=self.registry,
        )
        self.held = Gauge(
            "baton_router_requests_held",
            "Requests that wait since no node can take them.",
            registry=self.registry,
        )
        self.conflicts = Gauge(
            "baton_router_node_name_conflicts",
            "Nodes that are not used since newer ones have their names.",
            registry=self.registry,
        )
        tasks = Gauge("baton_asyncio_tasks", "Tasks of this process.", registry=self.registry)
        tasks.set_function(lambda: len(asyncio.all_tasks()))
        self.registry.register(NodeFigures(view))

    def unheard(self, dropped: Callable[[], int], refused: Callable[[], Mapping[str, int]]) -> None:
        """`dropped` counts the chunk events that were not taken, `refused` by reason what else
        nodes said in vain."""
        self.registry.register(_Unheard(dropped, refused))

    def placed(self, placement: Placement, cause: str | None, tokens: int) -> None:
        """`cause` of what is placed again; its client has so many tokens."""
        self._placements.labels(placement.reason).inc()
        self._attempts.inc()
        if cause is None:
            self._demand.placed(placement.uncached)
        else:
            self._retries.labels(cause).inc()
        if tokens:
            self._resumed.inc()
            self._kept.inc(tokens)

    def accepted(self, prompts: Iterable[int]) -> None:
        """The requests of one call, each by its prompt's tokens."""
        self._demand.accepted(prompts)

    def delivered(self, tokens: int) -> None:
        self._demand.delivered(tokens)

    def measured(self, stats: RequestStats, attempt: int, *, opening: bool) -> None:
        """How a node closed the gap. `opening`: it is the first of the attempt to say so."""
        if opening:
            self.queue.observe(stats.queue_ms / 1000)
            self._found(stats)
        if attempt > 1:
            self._recomputed.inc(stats.computed_tokens)

    def missed(self, miss: PredictionError) -> None:
        """How far a prediction was from what came."""
        self._error.labels(miss.way).observe(abs(miss.measured_s - miss.predicted_s))
        if miss.predicted_s > COUNTED_S:
            self._ratio.labels(miss.way).observe(miss.measured_s / miss.predicted_s)

    def _found(self, stats: RequestStats) -> None:
        """Of whom had to have the prompt: the prefill node, or the only one."""
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

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"baton_router_{name}_total", what, registry=self.registry)

    def _histogram(self, name: str, what: str) -> Timings:
        timings = Timings(f"baton_router_{name}_seconds", what, _SECONDS)
        self.registry.register(timings)
        return timings


class _Unheard(Collector):
    def __init__(
        self, dropped: Callable[[], int], refused: Callable[[], Mapping[str, int]]
    ) -> None:
        self._dropped = dropped
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        help_text = "Chunk events not taken: too many at once, or after a gap."
        name = "baton_router_cache_events_dropped_total"
        yield CounterMetricFamily(name, help_text, value=float(self._dropped()))
        family = CounterMetricFamily(
            "baton_router_node_reports_refused_total",
            "What nodes sent and was not taken: it is too large, or a figure is out of bounds.",
            labels=("reason",),
        )
        for reason, count in self._refused().items():
            family.add_metric((reason,), float(count))
        yield family


class NodeFigures(Collector):
    """Every field of NodeLoad, per node: `*_total` as counters, the rest as gauges."""

    def __init__(self, view: PoolView) -> None:
        self._view = view

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to read at registration: nodes come later

    def collect(self) -> Iterator[Metric]:
        nodes = list(self._view.nodes.values())
        for name in LOAD_NUMBERS:
            yield _family(name, nodes)
        up = GaugeMetricFamily(
            "baton_node_ready", "1 while the node may get requests.", labels=("node", "role")
        )
        for view in nodes:
            ready = state_of(view) == "ready"
            up.add_metric((view.report.node, view.report.role), float(ready))
        yield up


def _family(name: str, nodes: list[NodeView]) -> Metric:
    public = _PUBLIC.get(name, f"baton_{name}")
    family: CounterMetricFamily | GaugeMetricFamily
    label = name.replace("_", " ")
    if name.endswith("_total"):
        family = CounterMetricFamily(public, f"Node: {label}.", labels=("node",))
    else:
        family = GaugeMetricFamily(public, f"Node: {label}.", labels=("node",))
    for view in nodes:
        family.add_metric((view.report.node,), float(getattr(view.report.load, name)))
    return family
