"""Figures of the last second: differences between two looks at counters that the router has anyway.

In: the router's load report, its nodes' loads, and the look before. Out: rates and latencies. A
figure is None if nothing is known of the time between the looks. Nothing is counted for a series
while nobody looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from baton_protocol.ids import Epoch, NodeId
from baton_protocol.store import LATENCY_BOUNDS_S, RouterReport
from baton_router.nodes.node_view import NodeView


@dataclass(frozen=True, slots=True)
class NodeRates:
    """Tokens sampled, and bytes of KV from and to the store; per second."""

    tokens: float
    kv_in: float
    kv_out: float


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """A node's counters at the load report of time `at`, and their rates since the one before."""

    epoch: Epoch
    at: float
    tokens: int
    kv_in: int
    kv_out: int
    rates: NodeRates | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What was counted up to time `at` of the router's clock. `errors` counts failed calls."""

    at: float
    report: RouterReport
    errors: int = 0
    nodes: Mapping[NodeId, NodeCounts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Per second; latencies in milliseconds."""

    requests: float | None = None
    tokens: float | None = None
    prompt_tokens: float | None = None
    errors: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None


def rates_between(before: Look | None, now: Look) -> Rates:
    if before is None or now.at <= before.at:
        return Rates()
    seconds, old, new = now.at - before.at, before.report, now.report
    ttft = _differences(old.ttft_counts, new.ttft_counts)
    itl = _differences(old.itl_counts, new.itl_counts)
    return Rates(
        requests=(new.requests_total - old.requests_total) / seconds,
        tokens=(new.output_tokens_total - old.output_tokens_total) / seconds,
        prompt_tokens=(new.prompt_tokens_total - old.prompt_tokens_total) / seconds,
        errors=(now.errors - before.errors) / seconds,
        ttft_p50_ms=quantile_ms(ttft, 0.5),
        ttft_p99_ms=quantile_ms(ttft, 0.99),
        itl_p50_ms=quantile_ms(itl, 0.5),
        itl_p99_ms=quantile_ms(itl, 0.99),
    )


def count_nodes(
    nodes: Iterable[NodeView], before: Mapping[NodeId, NodeCounts]
) -> dict[NodeId, NodeCounts]:
    """The nodes' counters now. `before` are those of the look before."""
    return {view.report.node: _count(view, before.get(view.report.node)) for view in nodes}


def _count(view: NodeView, before: NodeCounts | None) -> NodeCounts:
    load, epoch, at = view.report.load, view.report.epoch, view.loaded_at
    counts = (load.generated_tokens_total, load.fetched_bytes_total, load.published_bytes_total)
    if before is None or before.epoch != epoch or at < before.at:
        return NodeCounts(epoch, at, *counts)
    if at == before.at:  # no new report: its rates stay
        return before
    earlier, seconds = (before.tokens, before.kv_in, before.kv_out), at - before.at
    rates = [max(0, new - old) / seconds for new, old in zip(counts, earlier, strict=True)]
    return NodeCounts(epoch, at, *counts, NodeRates(*rates))


def quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """The value below which this share of a histogram with LATENCY_BOUNDS_S lies, in milliseconds,
    as if values were spread evenly between two bounds. None if the histogram is empty. A value
    above all bounds counts as the highest one."""
    rank = share * sum(counts)
    if not rank:
        return None
    passed = 0
    for (low, high), count in zip(pairwise((0.0, *LATENCY_BOUNDS_S)), counts, strict=False):
        if passed + count >= rank:
            return round(1e3 * (low + (high - low) * (rank - passed) / count), 3)
        passed += count
    return 1e3 * LATENCY_BOUNDS_S[-1]


def _differences(before: Sequence[int], now: Sequence[int]) -> list[int]:
    return [new - old for old, new in zip(before, now, strict=True)]
