"""A node's /metrics page for Prometheus.

The page shows the node's last load report and its requests' waits, with the label `node`, and its
data servers, with the labels `node` and `instance` (the index in the data URLs).

In: the node's Load, read at each scrape, and each wait when it ends. Out: text. It uses its own
registry, so nothing is global.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_protocol.ids import NodeId
from baton_protocol.link import Load, RequestStats

# Each entry: metric name (counters without `_total`), field of NodeLoad or Speeds, help text.
COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("baton_kv_published_bytes", "published_bytes_total", "KV bytes put into the store"),
    ("baton_kv_published_chunks", "published_chunks_total", "chunks put into the store"),
    ("baton_kv_announced_chunks", "announced_chunks_total", "chunks announced without a put"),
    ("baton_kv_fetched_bytes", "fetched_bytes_total", "KV bytes fetched from the store"),
    ("baton_kv_fetched_chunks", "fetched_chunks_total", "chunks fetched from the store"),
    ("baton_kv_chunks_reused", "reused_chunks_total", "fetched chunks that a request used"),
    ("baton_kv_chunks_lost", "lost_chunks_total", "chunks asked for in vain"),
    ("baton_kv_blocks_queried", "queried_blocks_total", "full blocks that requests asked for"),
    ("baton_kv_blocks_matched", "matched_blocks_total", "of those, in the own cache or the store"),
    ("baton_kv_blocks_fetched", "fetched_blocks_total", "of those, brought from the store"),
    ("baton_kv_blocks_used", "used_blocks_total", "of those, given to the engine"),
    ("baton_kv_blocks_declined", "declined_blocks_total", "matched, and cheaper to compute"),
    ("baton_kv_behind_chunks", "behind_chunks_total", "chunks written behind"),
    ("baton_kv_behind_bytes", "behind_bytes_total", "KV bytes written behind"),
    ("baton_kv_behind_skipped", "behind_skipped_total", "chunks not written behind"),
    ("baton_kv_host_blocks_stored", "host_stored_blocks_total", "blocks sent to the host tier"),
    ("baton_kv_host_blocks_loaded", "host_loaded_blocks_total", "of those, that came back"),
    ("baton_kv_host_blocks_evicted", "host_evicted_blocks_total", "of those, that made room"),
    ("baton_handoffs", "handoffs_total", "requests taken over from a prefill node"),
    ("baton_jobs", "jobs_total", "jobs that the engine has heard of"),
    ("baton_grammars_compiled", "grammars_compiled_total", "grammars that were compiled"),
    ("baton_grammar_compile_seconds", "grammar_compile_seconds_total", "time that it took"),
    ("baton_grammar_hits", "grammar_hits_total", "requests whose grammar was compiled already"),
    ("baton_engine_steps", "engine_steps_total", "steps of the engine"),
    ("baton_preemptions", "preemptions_total", "sequences that lost their blocks"),
    ("baton_prompt_tokens", "prompt_tokens_total", "prompt tokens, however they were had"),
    ("baton_prompt_tokens_computed", "computed_prompt_tokens_total", "of those, computed here"),
    ("baton_prompt_tokens_cached", "cached_prompt_tokens_total", "of those, in the own cache"),
    ("baton_prompt_tokens_host", "host_prompt_tokens_total", "of those, from the host tier"),
    ("baton_prompt_tokens_fetched", "fetched_prompt_tokens_total", "of those, from the store"),
    ("baton_generated_tokens", "generated_tokens_total", "tokens sampled"),
)
GAUGES: tuple[tuple[str, str, str], ...] = (
    ("baton_requests", "requests", "requests and prefill jobs that have not ended"),
    ("baton_requests_waiting", "waiting", "sequences not running yet"),
    ("baton_requests_running", "running", "sequences in the batch"),
    ("baton_requests_parked", "parked", "sequences that wait for chunks or their first token"),
    ("baton_queued_tokens", "queued_tokens", "prompt tokens known and not computed"),
    ("baton_kv_blocks_free", "free_blocks", "KV blocks that can be had, cached ones included"),
    ("baton_kv_blocks_cached", "cached_blocks", "free KV blocks that hold something findable"),
    ("baton_kv_blocks", "total_blocks", "KV blocks"),
    ("baton_kv_host_blocks_held", "host_blocks", "KV blocks in the host tier"),
    ("baton_kv_host_bytes_held", "host_bytes", "their bytes"),
    ("baton_kv_host_blocks", "host_total_blocks", "KV blocks that the host tier may hold"),
)
SPEEDS: tuple[tuple[str, str, str], ...] = (
    ("baton_prefill_tokens_per_second", "prefill_tokens_per_s", "measured prefill speed"),
    ("baton_decode_step_milliseconds", "decode_step_ms", "measured time of a decode step"),
    ("baton_kv_put_bytes_per_second", "put_bytes_per_s", "measured speed into the store"),
    ("baton_kv_get_bytes_per_second", "get_bytes_per_s", "measured speed out of the store"),
    ("baton_kv_get_latency_milliseconds", "get_latency_ms", "of a get beside its bytes"),
)
# As above, but with the fields of DataInstance, once per data server.
STORE_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("baton_store_evicted_keys", "evicted_keys", "keys that a data server evicted"),
)
STORE_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("baton_store_used_bytes", "used_bytes", "memory that a data server uses"),
    ("baton_store_limit_bytes", "limit_bytes", "memory that it may use; 0 is no bound"),
    ("baton_store_put_bytes_per_second", "put_bytes_per_s", "measured speed into it"),
    ("baton_store_get_bytes_per_second", "get_bytes_per_s", "measured speed out of it"),
    ("baton_store_get_latency_milliseconds", "get_latency_ms", "of a get beside its bytes"),
)

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
WAITS: dict[str, str] = {
    "handoff_wait": "from a job with a prefill partner to the router's word about its first token",
    "fetch": "from the first fetch of a request's chunks to the last",
    "queue": "in which a request's prompt was neither fetched nor computed, here or by a partner",
    "prefill": "from admission to the computed prompt",
}


class NodeMetrics:
    """The metrics page, and histograms of the phases before a request's first token."""

    def __init__(self, node: NodeId, read: Callable[[], Load]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(NodeFigures(node, read))
        self._waits = {
            name: Histogram(
                f"baton_{name}_seconds",
                f"Time {what}.",
                ("node",),
                registry=self._registry,
                buckets=BUCKETS_S,
            ).labels(node)
            for name, what in WAITS.items()
        }

    def handed_off(self, seconds: float) -> None:
        self._waits["handoff_wait"].observe(seconds)

    def prompted(self, stats: RequestStats) -> None:
        """Observe the phases of a prompt that is now computed. A request that fetched nothing does
        not count in the fetch histogram."""
        self._waits["queue"].observe(stats.queue_ms / 1e3)
        self._waits["prefill"].observe(stats.prefill_ms / 1e3)
        if stats.fetched_tokens:
            self._waits["fetch"].observe(stats.fetch_ms / 1e3)

    def page(self) -> bytes:
        """Return the page. Call it in the server's event loop."""
        return generate_latest(self._registry)


class NodeFigures(Collector):
    def __init__(self, node: NodeId, read: Callable[[], Load]) -> None:
        self._node = node
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registration must not read the load

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        node = [((self._node,), now.load)]
        store = [((self._node, str(i)), each) for i, each in enumerate(now.instances)]
        yield from _families(CounterMetricFamily, COUNTERS, ("node",), node)
        yield from _families(GaugeMetricFamily, GAUGES, ("node",), node)
        yield from _families(GaugeMetricFamily, SPEEDS, ("node",), [((self._node,), now.speeds)])
        of_each = ("node", "instance")
        yield from _families(CounterMetricFamily, STORE_COUNTERS, of_each, store)
        yield from _families(GaugeMetricFamily, STORE_GAUGES, of_each, store)
        usable = GaugeMetricFamily(
            "baton_store_usable", "1: it can be read, and takes chunks", labels=of_each
        )
        for labels, instance in store:
            usable.add_metric(labels, float(not (instance.trouble or instance.put_trouble)))
        yield usable
        tasks = GaugeMetricFamily("baton_asyncio_tasks", "tasks of the server", labels=["node"])
        tasks.add_metric([self._node], len(asyncio.all_tasks()))
        yield tasks


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    table: Sequence[tuple[str, str, str]],
    labels: Sequence[str],
    rows: Sequence[tuple[Sequence[str], object]],
) -> Iterator[Metric]:
    """Yield one metric family per entry of the table, with one sample per row."""
    for name, field, what in table:
        family = kind(name, what, labels=labels)
        for values, source in rows:
            family.add_metric(values, getattr(source, field))
        yield family
