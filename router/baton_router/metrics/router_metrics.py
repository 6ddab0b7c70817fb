"""The router's Prometheus page: its own figures, and its nodes' counters with the label `node`.

In: what the handlers observe, and the pool view at scrape time. Out: the exposition text. The
router re-exports the nodes' counters so that one scrape target shows a whole laptop pool.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton_protocol.link import RequestStats
from baton_protocol.metrics import metrics_of
from baton_protocol.store import LATENCY_BOUNDS_S, NodeLoad, RouterReport
from baton_router.nodes.model_grammars import GrammarCounts
from baton_router.nodes.pool_view import LOAD_NUMBERS, NodeView, PoolView, state_of
from baton_router.openai.answers import Usage
from baton_router.placement.placement import Placement, PredictionError


class Timings(Collector):
    """A Prometheus histogram without labels that is cheap to observe, since the router does so for
    each token.

    In: seconds, from one thread. Out: the same samples as prometheus_client's histogram.

    `bounds` are ascending upper bounds. `counts[i]` counts values above bound i - 1 and up to bound
    i; the last entry counts values above all bounds.
    """

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._what = help_text
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self.counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)


class Demand:
    """Counts the demand of this router's clients and their latencies.

    In: requests accepted and placed, tokens delivered. Out: a RouterReport for the autoscaler;
    /metrics also shows `ttft` and `itl`. All counters start at 0 with the process. `router` is a
    name that is unique to this start of the router.
    """

    def __init__(self, router: str, clock: Callable[[], float]) -> None:
        self.router = router
        self._clock = clock
        self._started = self._busy_at = clock()
        self._requests = self._prompt_tokens = self._uncached_tokens = self._output_tokens = 0
        self.ttft = _timings(
            "time_to_first_token", "Seconds from a request's start to its first token."
        )
        self.itl = _timings("inter_token_latency", "Seconds between two deltas of one choice.")

    def accepted(self, prompts: Iterable[int]) -> None:
        """Count a call's requests. `prompts` holds the tokens of each prompt."""
        self._busy_at = self._clock()
        for tokens in prompts:
            self._requests += 1
            self._prompt_tokens += tokens

    def placed(self, uncached: int) -> None:
        """Count a first placement, with the prompt tokens to compute."""
        self._uncached_tokens += uncached

    def delivered(self, tokens: int) -> None:
        self._output_tokens += tokens

    def report(self, live: int, held: int) -> RouterReport:
        """The current report. Requests that ended since the last call count as busy until that
        call, so `idle_s` is too long by at most the time between the calls."""
        now = self._clock()
        if live or held:
            self._busy_at = now
        return RouterReport(
            router=self.router,
            uptime_s=now - self._started,
            requests_total=self._requests,
            prompt_tokens_total=self._prompt_tokens,
            uncached_tokens_total=self._uncached_tokens,
            output_tokens_total=self._output_tokens,
            live=live,
            held=held,
            idle_s=now - self._busy_at,
            ttft_counts=tuple(self.ttft.counts),
            itl_counts=tuple(self.itl.counts),
        )


def _timings(name: str, help_text: str) -> Timings:
    return Timings(f"baton_router_{name}_seconds", help_text, LATENCY_BOUNDS_S)


MAX_TENANTS = 1000
OTHER = "other"
_WAIT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)


class AdmissionMetrics:
    """Metrics of admission: tokens by tenant, queue lengths and waits, errors by code.

    In: what Admission and the middleware observe. Out: metrics in the router's registry. Labels are
    bounded: tenants come from the file of keys, priorities from -100 to 100, codes from the error
    vocabulary. The first MAX_TENANTS tenants get a label each, later ones share OTHER.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenants: set[str] = set()
        self._tokens = Counter(
            "baton_router_tenant_tokens_total",
            "Tokens of ended requests, by tenant and kind: prompt or completion.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._queue = Gauge(
            "baton_router_admission_queue",
            "Calls that wait in the router because every node is full, by priority.",
            ("priority",),
            registry=registry,
        )
        self._waits = Histogram(
            "baton_router_admission_wait_seconds",
            "Seconds that each prompt waited in the router, admitted or not, by priority.",
            ("priority",),
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._refused = Counter(
            "baton_router_rejected_total",
            "Generation requests that ended in an error, by error code.",
            ("code",),
            registry=registry,
        )

    def used(self, tenant: str, usage: Usage) -> None:
        if tenant not in self._tenants and len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        label = tenant if tenant in self._tenants else OTHER
        self._tokens.labels(label, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(label, "completion").inc(usage.completion_tokens)

    def lengths(self, by_priority: Mapping[int, int]) -> None:
        for priority, length in by_priority.items():
            self._queue.labels(str(priority)).set(length)

    def waited(self, priority: int, seconds: float, by_priority: Mapping[int, int]) -> None:
        self._waits.labels(str(priority)).observe(seconds)
        self.lengths(by_priority)

    def rejected(self, code: str) -> None:
        self._refused.labels(code).inc()


_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120)
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2, 4, 10, 100)
COUNTED_S = 0.001  # the ratio of a shorter prediction says nothing

NODE_METRICS = metrics_of(NodeLoad)  # by field, with their names on the nodes' own pages


class RouterMetrics:
    """The router's own metrics. Times are in seconds. What concerns demand is also counted for the
    router's load report."""

    def __init__(self, view: PoolView, demand: Demand) -> None:
        self._demand = demand
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "baton_router_requests_total",
            "Answers by endpoint and HTTP status; 499 means that the client left.",
            ("endpoint", "code"),
            registry=self.registry,
        )
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

    def accepted(self, prompts: Iterable[int]) -> None:
        """Count a call's requests. `prompts` holds the tokens of each prompt."""
        self._demand.accepted(prompts)

    def delivered(self, tokens: int) -> None:
        self._demand.delivered(tokens)

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
        for name in LOAD_NUMBERS:
            yield _family(name, nodes)
        up = GaugeMetricFamily(
            "baton_node_ready", "1 if the node can get requests, else 0.", labels=("node", "role")
        )
        for view in nodes:
            ready = state_of(view) == "ready"
            up.add_metric((view.report.node, view.report.role), float(ready))
        yield up


def _family(name: str, nodes: list[NodeView]) -> Metric:
    metric = NODE_METRICS[name]
    family: CounterMetricFamily | GaugeMetricFamily
    label = name.replace("_", " ")
    if metric.is_counter:
        family = CounterMetricFamily(metric.name, f"Node: {label}.", labels=("node",))
    else:
        family = GaugeMetricFamily(metric.name, f"Node: {label}.", labels=("node",))
    for view in nodes:
        family.add_metric((view.report.node,), float(getattr(view.report.load, name)))
    return family
