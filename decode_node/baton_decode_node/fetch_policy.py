"""Fetch from the store, or compute? One pure decision per run of chunks.

Moving KV beats computing it only where the link is faster than bytes per token x tokens/s of
prefill: a small model on a fast device computes sooner than any network brings. So a run of
neighbouring chunks is fetched if

    max over its data servers of (latency + bytes there / rate of gets) < tokens / prefill speed

and computed otherwise. What was not measured is fetched: that measures it. Chunks on a server in
trouble count as absent, whatever the policy. Nothing is weighed for a hand-off's chunks: the router
did that.

`decide` is pure. `FetchChooser` applies it, and keeps its figures true: where everything is
declined nothing is fetched, and a rate measured in a bad moment would be believed for ever. So of
what was declined one chunk per data server is read now and then, behind everything else and into
nothing: that measures the server and costs no request anything.

In: where chunks are, how much the own cache holds, measured speeds. Out: which to fetch, and the
numbers; KVConnector.fetch of samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton_node.engine.context import LoopContext
from baton_node.engine.job import Job
from baton_node.settings import FetchPolicy
from baton_node.store.base import PADDING, ChunkRef
from baton_protocol.ids import RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance, Priority

SAMPLE_EVERY_S = 10.0
NOBODY = RequestId("")  # whose chunk a sample is


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
    costs: FetchCosts,
    policy: FetchPolicy = "auto",
) -> FetchDecision:
    """`chunks` maps those that exist to the number of their data server; the first `cached_blocks`
    blocks of the chain are here already."""
    size = costs.layout.chunk_blocks
    wanted = {
        chunk: instance
        for chunk, instance in chunks.items()
        if (chunk + 1) * size > cached_blocks and not _seen(costs, instance).trouble
    }
    fetch = declined = 0
    fetch_s = compute_s = 0.0
    for run in _runs(wanted):
        bits = sum(1 << chunk for chunk in run)
        blocks = (run[-1] + 1) * size - max(run[0] * size, cached_blocks)
        to_fetch = _fetch_s([wanted[chunk] for chunk in run], costs)
        to_compute = _compute_s(blocks, costs)
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


def _fetch_s(instances: Sequence[int], costs: FetchCosts) -> float:
    """Seconds to fetch one chunk from each of `instances`, which work side by side; 0.0 where one
    was not measured."""
    slowest = 0.0
    for instance, count in Counter(instances).items():
        seen = _seen(costs, instance)
        if seen.get_bytes_per_s <= 0.0:
            return 0.0
        moved = count * costs.layout.chunk_bytes / seen.get_bytes_per_s
        slowest = max(slowest, seen.get_latency_ms / 1e3 + moved)
    return slowest


def _compute_s(blocks: int, costs: FetchCosts) -> float:
    if costs.prefill_tokens_per_s <= 0.0:
        return 0.0
    return blocks * costs.layout.block_size / costs.prefill_tokens_per_s


def _seen(costs: FetchCosts, instance: int) -> DataInstance:
    known = 0 <= instance < len(costs.instances)
    return costs.instances[instance] if known else DataInstance()


def _runs(chunks: Mapping[int, int]) -> list[list[int]]:
    """Neighbouring chunks together, in order."""
    runs: list[list[int]] = []
    for chunk in sorted(chunks):
        if runs and runs[-1][-1] + 1 == chunk:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


class FetchChooser:
    """Owned by the step loop's thread."""

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._policy: FetchPolicy = context.options.fetch
        self._sampled: dict[int, float] = {}  # data server -> when

    def choose(self, job: Job, cached_blocks: int) -> FetchDecision:
        """Which of the chunks that have a marker this job should fetch."""
        context = self._context
        speed = context.speeds.speeds().prefill_tokens_per_s
        costs = FetchCosts(context.layout, speed, context.connector.instances())
        places = {chunk: marker.instance for chunk, marker in job.markers.items()}
        decision = decide(places, cached_blocks, costs, self._policy)
        if self._policy == "auto":
            self._sample(job, decision.declined)
        return decision

    def _sample(self, job: Job, declined: int) -> None:
        now = self._context.clock()
        for chunk, marker in job.markers.items():
            last = self._sampled.get(marker.instance)
            due = last is None or now >= last + SAMPLE_EVERY_S
            if due and declined >> chunk & 1:
                self._sampled[marker.instance] = now
                ref = ChunkRef(NOBODY, 0, chunk, job.chunks[chunk])
                nowhere = (PADDING,) * self._context.layout.chunk_blocks
                self._context.connector.fetch(ref, marker, nowhere, Priority.BEHIND)
