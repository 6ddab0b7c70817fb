"""Chooses between fetching a request's chunks and computing them, by the node's measured speeds.

In: jobs whose lookup was answered. Out: a FetchDecision each; fetches that measure data
servers.
"""

from __future__ import annotations

from baton_decode_node.fetch_decision import (
    FetchCosts,
    FetchDecision,
    decide,
    instance_of,
    usable,
)
from baton_engine.interface import PADDING
from baton_node.engine.chunk_sets import chunks_of
from baton_node.engine.job import Job
from baton_node.engine.loop_context import LoopContext
from baton_node.store.base import ChunkRef
from baton_protocol.ids import RequestId
from baton_protocol.policies import FetchPolicy
from baton_protocol.store import Priority

SAMPLE_EVERY_S = 10.0
NO_REQUEST = RequestId("")  # the request id of a sample


class FetchChooser:
    """Chooses between fetching chunks from the store and computing them.

    Moving KV is faster than computing it only if the link is faster than bytes per token x prefill
    tokens/s: a small model on a fast device computes faster than any network transfers. So a run of
    neighbouring chunks is fetched if

        max over its data servers of (latency + bytes there / get rate) < tokens / prefill speed

    and computed otherwise. If a speed is not measured, the run is fetched, which measures it.
    Chunks on a server in trouble count as absent, whatever the policy. Chunks of a hand-off do not
    come here: the router has already decided to fetch them.

    `decide` is pure. `FetchChooser` applies it and keeps the measured rates fresh. If every chunk
    is declined, nothing is fetched, and a rate measured at a bad moment would never change. So
    every SAMPLE_EVERY_S seconds it reads one declined chunk per data server, at the lowest priority
    and into padding blocks. That measures the server at no cost to requests.

    Owned by the step loop's thread.
    """

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._policy: FetchPolicy = context.options.fetch
        self._sampled: dict[int, float] = {}  # data server -> time of its last sample

    def choose(self, job: Job, cached_blocks: int) -> FetchDecision:
        """Decide which of the chunks with a marker this job fetches."""
        context = self._context
        speed = context.speeds.speeds().prefill_tokens_per_s
        layout = context.layout
        costs = FetchCosts(layout, speed, context.connector.instances())
        exists = complete = 0
        for chunk, marker in job.markers.items():
            if not instance_of(costs, marker.instance).trouble:
                exists |= 1 << chunk
                complete |= (marker.payload_bytes == job.complete_bytes) << chunk
        useful, unneeded = usable(layout, len(job.chunks), exists, complete, cached_blocks)
        decision = decide(
            {chunk: job.markers[chunk].instance for chunk in chunks_of(useful)},
            cached_blocks,
            costs,
            self._policy,
            partial=exists & ~complete,
            unneeded=unneeded,
        )
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
                ref = ChunkRef(NO_REQUEST, 0, chunk, job.chunks[chunk])
                layout = self._context.layout
                padding = (PADDING,) * (layout.chunk_blocks * layout.num_groups)
                self._context.connector.fetch(ref, marker, padding, Priority.BEHIND)
