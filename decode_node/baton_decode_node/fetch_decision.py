"""Which of the chunks that the store holds to fetch, and which to compute: a pure function.

Of layers with a window (see KVLayout) a request needs only the last `window` tokens before those
that it computes. A lookup may find a chunk there without the blocks of all groups of layers; then
`usable` finds out what the rest is good for, and `decide` compares the costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton_node.engine.chunk_sets import chunks_of
from baton_protocol.layout import KVLayout
from baton_protocol.policies import FetchPolicy
from baton_protocol.store import DataInstance


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """What `decide` needs: this node's measured speeds. A speed of 0 is not measured."""

    layout: KVLayout
    prefill_tokens_per_s: float
    instances: Sequence[DataInstance]


def usable(
    layout: KVLayout, chunks: int, exists: int, complete: int, cached_blocks: int
) -> tuple[int, int]:
    """Return which stored chunks save computation, and of which chunks no KV is needed then.

    All sets are bit sets of a prompt's `chunks` full chunks: `exists` are stored, `complete` of
    these with the blocks of all groups. The node's cache holds the first `cached_blocks` blocks.

    A computed token needs the last `window` tokens before it in the groups with a window. So seen
    from the prompt's end, a chunk that these tokens reach is useful only if it is complete.
    Otherwise it is computed, and then needs the tokens before it.
    """
    if layout.window is None:
        return exists, 0
    tokens, partial = layout.chunk_tokens, layout.num_full_groups > 0
    useful = unneeded = 0
    seen = layout.window_start(chunks * tokens - 1)  # the first token that the windows reach
    for chunk in range(chunks - 1, cached_blocks // layout.chunk_blocks - 1, -1):
        bit = 1 << chunk
        if (chunk + 1) * tokens > seen:
            stored = complete & bit
        elif partial:
            stored = exists & bit
        else:
            unneeded |= bit
            continue
        useful |= stored
        if not stored:
            computed = max(chunk * tokens, cached_blocks * layout.block_size)
            seen = layout.window_start(computed)
    return useful, unneeded


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """Which chunks to fetch. The sets are bit sets.

    The times are predictions for all considered chunks together: to fetch them all, and to compute
    them all. Runs of chunks with unmeasured speeds count as 0.
    """

    fetch: int = 0
    declined: int = 0  # chunks that exist, but are not fetched
    unneeded: int = 0  # chunks of which no KV is needed if the chunks in `fetch` are fetched
    fetch_ms: float = 0.0
    compute_ms: float = 0.0


def decide(
    chunks: Mapping[int, int],
    cached_blocks: int,
    costs: FetchCosts,
    policy: FetchPolicy = "auto",
    *,
    partial: int = 0,
    unneeded: int = 0,
) -> FetchDecision:
    """Decide for each run of neighbouring chunks whether to fetch it.

    `chunks` maps each existing chunk to the number of its data server. The node's cache already
    holds the first `cached_blocks` blocks of the prompt. Chunks in `partial` are stored without the
    groups with a window. Chunks in `unneeded` belong to a run, but are not fetched (see `usable`).
    """
    size = costs.layout.chunk_blocks
    wanted = {
        chunk: instance
        for chunk, instance in chunks.items()
        if (chunk + 1) * size > cached_blocks and not instance_of(costs, instance).trouble
    }
    fetch = declined = 0
    fetch_s = compute_s = 0.0
    for run in _runs({*wanted, *chunks_of(unneeded)}):
        stored = {chunk: wanted[chunk] for chunk in run if chunk in wanted}
        bits = sum(1 << chunk for chunk in stored)
        blocks = (run[-1] + 1) * size - max(run[0] * size, cached_blocks)
        to_fetch = _fetch_s(stored, partial, costs)
        to_compute = _compute_s(blocks, costs)
        if policy == "always" or (policy == "auto" and _pays(to_fetch, to_compute)):
            fetch |= bits
        else:
            declined |= bits
            unneeded &= ~sum(1 << chunk for chunk in run)
        fetch_s += to_fetch
        compute_s += to_compute
    return FetchDecision(fetch, declined, unneeded, fetch_s * 1e3, compute_s * 1e3)


def _pays(fetch_s: float, compute_s: float) -> bool:
    """Return whether fetching is faster. 0.0 means not measured; then fetch, which measures it."""
    return not (fetch_s and compute_s) or fetch_s < compute_s


def _fetch_s(chunks: Mapping[int, int], partial: int, costs: FetchCosts) -> float:
    """Return the predicted seconds to fetch chunks (see `decide`).

    Servers work in parallel. 0.0 if the speed of one of the servers is not measured.
    """
    complete_bytes, partial_bytes = costs.layout.chunk_bytes, costs.layout.full_groups_bytes
    sizes: Counter[int] = Counter()
    for chunk, instance in chunks.items():
        sizes[instance] += partial_bytes if partial >> chunk & 1 else complete_bytes
    slowest = 0.0
    for instance, size in sizes.items():
        seen = instance_of(costs, instance)
        if seen.get_bytes_per_s <= 0.0:
            return 0.0
        slowest = max(slowest, seen.get_latency_ms / 1e3 + size / seen.get_bytes_per_s)
    return slowest


def _compute_s(blocks: int, costs: FetchCosts) -> float:
    if costs.prefill_tokens_per_s <= 0.0:
        return 0.0
    return blocks * costs.layout.block_size / costs.prefill_tokens_per_s


def instance_of(costs: FetchCosts, instance: int) -> DataInstance:
    is_listed = 0 <= instance < len(costs.instances)
    return costs.instances[instance] if is_listed else DataInstance()


def _runs(chunks: Iterable[int]) -> list[list[int]]:
    """Group neighbouring chunks, in ascending order."""
    runs: list[list[int]] = []
    for chunk in sorted(chunks):
        if runs and runs[-1][-1] + 1 == chunk:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs
