"""Applies `fetch_policy` to what a lookup found, and keeps its figures true.

Where everything is declined nothing is fetched, and a rate measured in a bad moment would be
believed for ever. So of what was declined one chunk per data server is read now and then, behind
everything else and into nothing: that measures the server and costs no request anything.

In: a job whose lookup was answered. Out: the decision; KVConnector.fetch of samples.
"""

from __future__ import annotations

from collections.abc import Callable

from baton_node.engine.fetch_policy import FetchCosts, FetchDecision, decide
from baton_node.engine.job import Job
from baton_node.engine.speeds import SpeedMeter
from baton_node.settings import FetchPolicy
from baton_node.store.base import PADDING, ChunkRef, KVConnector
from baton_protocol.ids import RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.store import Priority

SAMPLE_EVERY_S = 10.0
NOBODY = RequestId("")  # whose chunk a sample is


class FetchChooser:
    """Owned by the step loop's thread."""

    def __init__(
        self,
        layout: KVLayout,
        connector: KVConnector,
        speeds: SpeedMeter,
        policy: FetchPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._connector = connector
        self._speeds = speeds
        self._policy: FetchPolicy = policy
        self._clock = clock
        self._sampled: dict[int, float] = {}  # data server -> when

    def weigh(self, job: Job) -> FetchDecision:
        """Which of the chunks that have a marker this job should fetch."""
        speed = self._speeds.speeds().prefill_tokens_per_s
        prices = FetchCosts(self._layout, speed, self._connector.instances())
        places = {chunk: marker.instance for chunk, marker in job.markers.items()}
        decision = decide(places, job.parked.cached_blocks, prices, self._policy)
        if self._policy == "auto":
            self._sample(job, decision.declined)
        return decision

    def _sample(self, job: Job, declined: int) -> None:
        now = self._clock()
        for chunk, marker in job.markers.items():
            last = self._sampled.get(marker.instance)
            due = last is None or now >= last + SAMPLE_EVERY_S
            if due and declined >> chunk & 1:
                self._sampled[marker.instance] = now
                ref = ChunkRef(NOBODY, 0, chunk, job.chunks[chunk])
                nowhere = (PADDING,) * self._layout.chunk_blocks
                self._connector.fetch(ref, marker, nowhere, Priority.BEHIND)
