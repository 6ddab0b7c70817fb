"""Fetch from the store, or compute? One pure decision per run of chunks.

Moving KV beats computing it only where the link is faster than bytes per token x tokens/s of
prefill: a small model on a fast device computes sooner than any network brings. So a run of
neighbouring chunks is fetched if

    max over its data servers of (latency + bytes there / rate of gets) < tokens / prefill speed

and computed otherwise. What was not measured is fetched: that measures it. Chunks on a server in
trouble count as absent, whatever the policy. Nothing is weighed for a hand-off's chunks: the router
did that.

In: where chunks are, how much the own cache holds, measured speeds. Out: which to fetch, and the
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton_node.settings import FetchPolicy
from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """What this node measured; 0 is not measured."""

    layout: KVLayout
    prefill_tokens_per_s: float
    instances: Sequence[DataInstance]


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """Chunks as bit sets; `declined` ones exist and are cheaper to compute. The times are those of
    all that was weighed, had it all been fetched or all been computed; 0 where not measured."""

    fetch: int = 0
    declined: int = 0
    fetch_ms: float = 0.0
    compute_ms: float = 0.0


def decide(
    chunks: Mapping[int, int],
    cached_blocks: int,
    prices: FetchCosts,
    policy: FetchPolicy = "auto",
) -> FetchDecision:
    """`chunks` maps those that exist to the number of their data server; the first `cached_blocks`
    blocks of the chain are here already."""
    size = prices.layout.chunk_blocks
    wanted = {
        chunk: instance
        for chunk, instance in chunks.items()
        if (chunk + 1) * size > cached_blocks and not _seen(prices, instance).trouble
    }
    fetch = declined = 0
    fetch_s = compute_s = 0.0
    for run in _runs(wanted):
        bits = sum(1 << chunk for chunk in run)
        blocks = (run[-1] + 1) * size - max(run[0] * size, cached_blocks)
        to_fetch = _fetch_s([wanted[chunk] for chunk in run], prices)
        to_compute = _compute_s(blocks, prices)
        if policy == "always" or (policy == "auto" and _pays(to_fetch, to_compute)):
            fetch |= bits
        else:
            declined |= bits
        fetch_s += to_fetch
        compute_s += to_compute
    return FetchDecision(fetch, declined, fetch_s * 1e3, compute_s * 1e3)


def _pays(fetch_s: float, compute_s: float) -> bool:
    """0.0 is not measured."""
    return not (fetch_s and compute_s) or fetch_s < compute_s


def _fetch_s(instances: Sequence[int], prices: FetchCosts) -> float:
    """Seconds to fetch one chunk from each of `instances`, which work side by side; 0.0 where one
    was not measured."""
    slowest = 0.0
    for instance, count in Counter(instances).items():
        seen = _seen(prices, instance)
        if seen.get_bytes_per_s <= 0.0:
            return 0.0
        moved = count * prices.layout.chunk_bytes / seen.get_bytes_per_s
        slowest = max(slowest, seen.get_latency_ms / 1e3 + moved)
    return slowest


def _compute_s(blocks: int, prices: FetchCosts) -> float:
    if prices.prefill_tokens_per_s <= 0.0:
        return 0.0
    return blocks * prices.layout.block_size / prices.prefill_tokens_per_s


def _seen(prices: FetchCosts, instance: int) -> DataInstance:
    known = 0 <= instance < len(prices.instances)
    return prices.instances[instance] if known else DataInstance()


def _runs(chunks: Mapping[int, int]) -> list[list[int]]:
    """Neighbouring chunks together, in order."""
    runs: list[list[int]] = []
    for chunk in sorted(chunks):
        if runs and runs[-1][-1] + 1 == chunk:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs
