"""The parking lot: requests that close their gap from the store before they run.

Feeds each parked request's state machine (`fetch_state`) with what happens, and does what it says:
reserves and releases blocks, starts fetches, admits, fails what can never run. Parked requests cost
the running batch nothing: a turn of the loop looks only at requests something happened to, at the
oldest one that wants blocks and at due timers.

In: jobs, connector events, the router's word. Out: calls of Engine.reserve/release, of
KVConnector.fetch, of `admit` and of `fail`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton_engine.interface import Engine
from baton_node.engine.counters import Counters
from baton_node.engine.fetch_state import Admission, FetchActions, Outcome
from baton_node.engine.job import Job, JobKey
from baton_node.store.base import Fetched, KVConnector
from baton_protocol.errors import BatonError


@dataclass(frozen=True, slots=True)
class FetchWaits:
    """How long a parked request waits for each thing, in seconds."""

    lookup_s: float
    chunks_s: float
    blocks_s: float


# Assumed until the link is measured, for the bytes' share of the wait.
SLOW_BYTES_PER_S = 50e6


class Fetcher:
    """Owned by the step loop's thread."""

    def __init__(
        self,
        engine: Engine,
        connector: KVConnector,
        counters: Counters,
        waits: FetchWaits,
        admit: Callable[[Job, Admission], None],
        fail: Callable[[Job, BatonError], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._counters = counters
        self._waits = waits
        self._admit = admit
        self._fail = fail
        self._clock = clock
        self._jobs: dict[JobKey, Job] = {}
        self._wanting: dict[int, Job] = {}
        self._holding: dict[int, Job] = {}
        self._timers: list[tuple[float, int, JobKey]] = []
        self._aborted = 0

    def __len__(self) -> int:
        """Parked requests, aborted ones that wait for their fetches not counted."""
        return len(self._jobs) - self._aborted

    @property
    def sequences(self) -> int:
        """What they are going to run here: each choice of a request, or the one prompt of a prefill
        job."""
        alive = (job for job in self._jobs.values() if not job.parked.aborted)
        return sum(len(job.open_choices) if job.kind == "run" else 1 for job in alive)

    @property
    def tokens(self) -> int:
        """What they are going to compute here."""
        return sum(job.uncached for job in self._jobs.values())

    @property
    def empty(self) -> bool:
        """True when nothing is parked and no fetch is in flight."""
        return not self._jobs

    def get(self, key: JobKey) -> Job | None:
        return self._jobs.get(key)

    def jobs(self) -> Iterable[Job]:
        return self._jobs.values()

    def park(self, job: Job) -> None:
        self._jobs[job.key] = job
        self.apply(job, job.parked.start())

    def apply(self, job: Job, outcome: Outcome) -> None:
        """Something happened to a parked request: its state becomes this, and this is done."""
        was = job.parked.aborted
        job.parked, actions = outcome
        self._aborted += job.parked.aborted and not was
        self._obey(job, actions)

    def settle(self, event: Fetched) -> Job | None:
        """A fetch came back. Return its request, which is here until the last one has; None for a
        sample, which belongs to nobody."""
        job = self._jobs.get((event.chunk.request, event.chunk.attempt))
        if job is None:
            return None
        if event.ok:
            job.brought |= 1 << event.chunk.index
            self._counters.fetched_chunks += 1
            self._counters.fetched_bytes += event.bytes
        else:
            self._counters.lost_chunks += 1
        job.times.fetch_ended = self._clock()
        index = event.chunk.index
        self.apply(job, job.parked.land(index) if event.ok else job.parked.lose(index))
        return job

    def grant(self) -> None:
        """Give blocks to those that can fetch, oldest first; stop at the first that finds none."""
        if not self._wanting:
            return
        # A request has one reservation: a newer attempt waits until the aborted one's has settled.
        held = {job.request.id for job in self._holding.values()}
        for seq in sorted(self._wanting):
            job = self._wanting[seq]
            if job.request.id in held:
                continue
            try:
                reservation = self._engine.reserve(job.request)
            except BatonError as error:
                self.apply(job, job.parked.abort())
                self._fail(job, error)
                continue
            if reservation is None:
                return
            job.reservation = reservation
            self._holding[job.seq] = job
            self.apply(job, job.parked.reserve(reservation.cached))

    def give_back(self) -> None:
        """The youngest that holds blocks gives them back."""
        if self._holding:
            job = self._holding[max(self._holding)]
            if not job.parked.returning:
                self.apply(job, job.parked.give_back())

    def expire(self, now: float) -> None:
        """Tell those whose time is up."""
        while self._timers and self._timers[0][0] <= now:
            deadline, _, key = heapq.heappop(self._timers)
            job = self._jobs.get(key)
            if job is not None and job.wait is not None and job.wait[0] == deadline:
                job.wait = None
                self.apply(job, job.parked.time_out())

    def next_deadline(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def _obey(self, job: Job, actions: FetchActions) -> None:
        self._rearm(job)
        if actions.release:
            self._release(job)
        for chunk in actions.fetch:
            job.times.fetch_began = job.times.fetch_began or self._clock()
            self._connector.fetch(
                job.ref(chunk), job.markers[chunk], job.destination(chunk), job.priority
            )
        if actions.admit is not None:
            self._leave(job, actions.admit)
            self._counters.reused_chunks += actions.admit.chunks
            self._admit(job, actions.admit)
        if actions.forget:
            self._aborted -= 1
            self._leave(job)

    def _release(self, job: Job) -> None:
        reservation, job.reservation = job.reservation, None
        self._holding.pop(job.seq, None)
        if reservation is not None:
            self._engine.release(reservation)

    def _leave(self, job: Job, admitted: Admission | None = None) -> None:
        """It runs now, or is gone. Each request comes here once."""
        self._counters.count(job.count(admitted))
        self._jobs.pop(job.key, None)
        self._wanting.pop(job.seq, None)
        self._holding.pop(job.seq, None)
        job.wait = None

    def _rearm(self, job: Job) -> None:
        """Note whether it wants blocks, and what it waits for now."""
        if job.parked.wants_blocks:
            self._wanting[job.seq] = job
        else:
            self._wanting.pop(job.seq, None)
        kind = self._waits_for(job)
        if kind is None:
            job.wait = None
        elif job.wait is None or job.wait[1] != kind:
            deadline = self._clock() + self._patience(job, kind)
            job.wait = (deadline, kind)
            heapq.heappush(self._timers, (deadline, job.seq, job.key))

    def _waits_for(self, job: Job) -> str | None:
        state = job.parked
        if state.over or state.aborted or state.awaits_first or state.expired:
            return None
        if state.wants_blocks:
            return "blocks"
        if job.looking:
            return "lookup"
        return "chunks"

    def _patience(self, job: Job, kind: str) -> float:
        if kind == "blocks":
            return self._waits.blocks_s
        if kind == "lookup" or not (job.parked.flying or self._connector.healthy()):
            return self._waits.lookup_s  # of a store in trouble not much is to be hoped
        size = self._engine.info.layout.chunk_bytes
        return self._waits.chunks_s + job.parked.missing.bit_count() * size / SLOW_BYTES_PER_S
