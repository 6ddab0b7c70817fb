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
    ("baton_kv_published_bytes", "published_bytes_total", "KV bytes put into the store."),
    ("baton_kv_published_chunks", "published_chunks_total", "Chunks put into the store."),
    (
        "baton_kv_announced_chunks",
        "announced_chunks_total",
        "Chunks already in the store, announced without a put.",
    ),
    ("baton_kv_fetched_bytes", "fetched_bytes_total", "KV bytes fetched from the store."),
    ("baton_kv_fetched_chunks", "fetched_chunks_total", "Chunks fetched from the store."),
    ("baton_kv_chunks_reused", "reused_chunks_total", "Fetched chunks that a request used."),
    (
        "baton_kv_chunks_lost",
        "lost_chunks_total",
        "Fetches that failed: the chunk was missing or damaged, or the store was down.",
    ),
    (
        "baton_kv_blocks_queried",
        "queried_blocks_total",
        "Full blocks of prompts, each looked up once per request.",
    ),
    (
        "baton_kv_blocks_matched",
        "matched_blocks_total",
        "Queried blocks found in the node's cache or in the store.",
    ),
    ("baton_kv_blocks_fetched", "fetched_blocks_total", "Matched blocks fetched from the store."),
    ("baton_kv_blocks_used", "used_blocks_total", "Matched blocks that their request used."),
    (
        "baton_kv_blocks_declined",
        "declined_blocks_total",
        "Matched blocks left in the store: computing them was predicted to be faster.",
    ),
    (
        "baton_kv_behind_chunks",
        "behind_chunks_total",
        "Chunks stored by write-behind, for which no request waits.",
    ),
    ("baton_kv_behind_bytes", "behind_bytes_total", "KV bytes stored by write-behind."),
    (
        "baton_kv_behind_skipped",
        "behind_skipped_total",
        "Chunks that write-behind skipped: no bandwidth, or the store is over half full.",
    ),
    (
        "baton_kv_host_blocks_stored",
        "host_stored_blocks_total",
        "Blocks that the cache evicted into the host tier.",
    ),
    (
        "baton_kv_host_blocks_loaded",
        "host_loaded_blocks_total",
        "Blocks loaded back from the host tier.",
    ),
    (
        "baton_kv_host_blocks_evicted",
        "host_evicted_blocks_total",
        "Blocks that the host tier evicted.",
    ),
    ("baton_handoffs", "handoffs_total", "Requests continued from a prefill node."),
    ("baton_jobs", "jobs_total", "Jobs of routers that the engine process received."),
    ("baton_grammars_compiled", "grammars_compiled_total", "Grammars compiled."),
    (
        "baton_grammar_compile_seconds",
        "grammar_compile_seconds_total",
        "Time spent compiling grammars.",
    ),
    ("baton_grammar_hits", "grammar_hits_total", "Requests whose grammar was already compiled."),
    (
        "baton_grammar_dead_ends",
        "grammar_dead_ends_total",
        "Requests that failed because their grammar allowed no further token.",
    ),
    ("baton_engine_steps", "engine_steps_total", "Steps of the engine."),
    ("baton_preemptions", "preemptions_total", "Sequences that lost their blocks to others."),
    ("baton_prompt_tokens", "prompt_tokens_total", "Prompt tokens, from every source."),
    (
        "baton_prompt_tokens_computed",
        "computed_prompt_tokens_total",
        "Prompt tokens that this node computed.",
    ),
    (
        "baton_prompt_tokens_cached",
        "cached_prompt_tokens_total",
        "Prompt tokens found in the node's cache.",
    ),
    (
        "baton_prompt_tokens_host",
        "host_prompt_tokens_total",
        "Prompt tokens loaded from the host tier.",
    ),
    (
        "baton_prompt_tokens_fetched",
        "fetched_prompt_tokens_total",
        "Prompt tokens fetched from the store.",
    ),
    ("baton_generated_tokens", "generated_tokens_total", "Tokens sampled."),
)
GAUGES: tuple[tuple[str, str, str], ...] = (
    ("baton_requests", "requests", "Requests and prefill jobs that have not ended."),
    ("baton_requests_waiting", "waiting", "Sequences that wait until the scheduler runs them."),
    ("baton_requests_running", "running", "Sequences in the running batch."),
    ("baton_requests_parked", "parked", "Sequences that wait for chunks or for their first token."),
    ("baton_queued_tokens", "queued_tokens", "Prompt tokens that the node still has to compute."),
    (
        "baton_kv_blocks_free",
        "free_blocks",
        "KV blocks that can be allocated, including cached ones.",
    ),
    (
        "baton_kv_blocks_cached",
        "cached_blocks",
        "Free KV blocks that the prefix cache still finds.",
    ),
    ("baton_kv_blocks", "total_blocks", "KV blocks of the node."),
    ("baton_kv_host_blocks_held", "host_blocks", "KV blocks in the host tier."),
    ("baton_kv_host_bytes_held", "host_bytes", "KV bytes in the host tier."),
    (
        "baton_kv_host_blocks",
        "host_total_blocks",
        "Capacity of the host tier in KV blocks; 0: the node has none.",
    ),
)
SPEEDS: tuple[tuple[str, str, str], ...] = (
    ("baton_prefill_tokens_per_second", "prefill_tokens_per_s", "Measured prefill speed."),
    ("baton_decode_step_milliseconds", "decode_step_ms", "Measured time of a decode step."),
    (
        "baton_kv_put_bytes_per_second",
        "put_bytes_per_s",
        "Measured put rate, all data servers together.",
    ),
    (
        "baton_kv_get_bytes_per_second",
        "get_bytes_per_s",
        "Measured get rate, all data servers together.",
    ),
    (
        "baton_kv_get_latency_milliseconds",
        "get_latency_ms",
        "Measured round trip of a get, of the slowest data server.",
    ),
)
# As above, but with the fields of DataInstance, once per data server.
STORE_COUNTERS: tuple[tuple[str, str, str], ...] = (
    (
        "baton_store_evicted_keys",
        "evicted_keys",
        "Keys that the data server evicted since its start.",
    ),
)
STORE_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("baton_store_used_bytes", "used_bytes", "Memory that the data server uses."),
    ("baton_store_limit_bytes", "limit_bytes", "Memory that the data server may use; 0: no limit."),
    (
        "baton_store_put_bytes_per_second",
        "put_bytes_per_s",
        "Measured put rate of this node into the data server.",
    ),
    (
        "baton_store_get_bytes_per_second",
        "get_bytes_per_s",
        "Measured get rate of this node from the data server.",
    ),
    (
        "baton_store_get_latency_milliseconds",
        "get_latency_ms",
        "Measured round trip of a get from the data server.",
    ),
)

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
WAITS: dict[str, str] = {
    "handoff_wait": "from a job with a prefill partner to FirstTokens or NoFirstTokens",
    "fetch": "from the start of a request's first fetch to the end of its last",
    "queue": "in which a request's prompt was neither fetched nor computed, on any node",
    "prefill": "from a request's admission until its prompt is computed",
}


class NodeMetrics:
    """The metrics page, and histograms of the phases before a request's first token."""

    def __init__(self, node: NodeId, read: Callable[[], Load]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(NodeFigures(node, read))
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
        return generate_latest(self.registry)


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
