"""A node's /metrics page for Prometheus.

The page shows the node's last load report, its requests' waits and its GPU, with the label `node`,
and its data servers, with the labels `node` and `instance` (the index in the data URLs).

In: the node's Load, read at each scrape, and each wait when it ends. Out: text. It uses its own
registry, so nothing is global.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_node.server.gpu_usage import ReadGpu
from baton_protocol.ids import NodeId
from baton_protocol.link import Load, RequestStats
from baton_protocol.metrics import MetricSpec, families_of, metrics_of
from baton_protocol.store import DataInstance, NodeLoad, Speeds
from baton_protocol.vllm_metrics import (
    CACHE_CONFIG,
    CACHE_CONFIG_HELP,
    CACHE_CONFIG_LABELS,
    LOAD_ALIASES,
)

LOAD_METRICS, SPEED_METRICS = metrics_of(NodeLoad), metrics_of(Speeds)
STORE_METRICS = metrics_of(DataInstance)  # once per data server
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
WAITS: dict[str, str] = {
    "handoff_wait": "from a job with a prefill partner to FirstTokens or NoFirstTokens",
    "fetch": "from the start of a request's first fetch to the end of its last",
    "queue": "in which a request's prompt was neither fetched nor computed, on any node",
    "prefill": "from a request's admission until its prompt is computed",
}


class NodeMetrics:
    """The metrics page, and histograms of the phases before a request's first token."""

    def __init__(
        self,
        node: NodeId,
        read: Callable[[], Load],
        gpu: ReadGpu | None = None,
        model: Callable[[], str] = str,
        block_size: int = 0,
    ) -> None:
        self.registry = CollectorRegistry()
        self._vllm = CollectorRegistry()
        self.registry.register(LoadCollector(node, read))
        self._vllm.register(VllmCollector(node, read, model, block_size))
        if gpu is not None:
            self.registry.register(GpuCollector(node, gpu))
        self._waits = {
            name: Histogram(
                f"baton_{name}_seconds",
                f"Time {what}.",
                ("node",),
                registry=self.registry,
                buckets=BUCKETS_S,
            ).labels(node)
            for name, what in WAITS.items()
        }

    def observe_handoff(self, seconds: float) -> None:
        self._waits["handoff_wait"].observe(seconds)

    def observe_prompt(self, stats: RequestStats) -> None:
        """Observe the phases of a prompt that is now computed. A request that fetched nothing does
        not count in the fetch histogram."""
        self._waits["queue"].observe(stats.queue_ms / 1e3)
        self._waits["prefill"].observe(stats.prefill_ms / 1e3)
        if stats.fetched_tokens:
            self._waits["fetch"].observe(stats.fetch_ms / 1e3)

    def page(self) -> bytes:
        """Return the page. Call it in the server's event loop."""
        return generate_latest(self.registry)

    def vllm_page(self) -> bytes:
        """The load under vLLM's names."""
        return generate_latest(self._vllm)


class LoadCollector(Collector):
    def __init__(self, node: NodeId, read: Callable[[], Load]) -> None:
        self._node = node
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registration must not read the load

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        name = self._node
        of_each = ("node", "instance")
        store = [((name, str(i)), instance) for i, instance in enumerate(now.instances)]
        yield from _families(LOAD_METRICS, ("node",), [((name,), now.load)])
        yield from _families(SPEED_METRICS, ("node",), [((name,), now.speeds)])
        yield from _families(STORE_METRICS, of_each, store)
        usable = GaugeMetricFamily(
            "baton_store_usable",
            "1 if this node can read from the data server and write to it.",
            labels=of_each,
        )
        for labels, instance in store:
            usable.add_metric(labels, float(not (instance.trouble or instance.put_trouble)))
        yield usable
        tasks = GaugeMetricFamily("baton_asyncio_tasks", "Tasks of the process.", labels=["node"])
        tasks.add_metric([self._node], len(asyncio.all_tasks()))
        yield tasks


class VllmCollector(Collector):
    """The load under vLLM's names, with its labels. `model` returns the model's name; a block has
    `block_size` tokens."""

    def __init__(
        self, node: NodeId, read: Callable[[], Load], model: Callable[[], str], block_size: int
    ) -> None:
        self._node = node
        self._model = model
        self._block_size = block_size
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        load = self._read().load
        for name, alias in LOAD_ALIASES.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family: CounterMetricFamily | GaugeMetricFamily
            family = kind(name, alias.help_text, labels=["model_name", "engine"])
            family.add_metric([self._model(), self._node], alias.value([load]))
            yield family
        cache = GaugeMetricFamily(CACHE_CONFIG, CACHE_CONFIG_HELP, labels=CACHE_CONFIG_LABELS)
        sizes = (str(self._block_size), str(load.total_blocks))
        cache.add_metric([self._model(), self._node, *sizes], 1.0)
        yield cache


class GpuCollector(Collector):
    """The load of the node's card, by all processes that use it."""

    def __init__(self, node: NodeId, read: ReadGpu) -> None:
        self._node = node
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        for name, help_text, value in (
            (
                "baton_gpu_busy",
                "Share of the last second or less in which a kernel ran on the node's GPU.",
                now and now.busy,
            ),
            (
                "baton_gpu_memory_used_bytes",
                "Memory of the node's GPU that all its processes use.",
                now and now.used,
            ),
            ("baton_gpu_memory_bytes", "Memory of the node's GPU.", now and now.total),
        ):
            family = GaugeMetricFamily(name, help_text, labels=["node"])
            if value is not None:
                family.add_metric([self._node], value)
            yield family


def _families(
    metrics: Mapping[str, MetricSpec],
    labels: Sequence[str],
    rows: Sequence[tuple[Sequence[str], object]],
) -> Iterator[Metric]:
    """Yield one metric family per declared metric, with one sample per field and row."""
    for name, fields in families_of(metrics).items():
        metric = metrics[fields[0]]
        family: CounterMetricFamily | GaugeMetricFamily
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        own = [key for key, _ in metric.labels]
        family = kind(name, metric.help_text, labels=[*labels, *own])
        for field in fields:
            more = [value for _, value in metrics[field].labels]
            for values, record in rows:
                family.add_metric([*values, *more], getattr(record, field))
        yield family
