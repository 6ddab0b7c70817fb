"""Parked requests: they fetch their prompt's KV from the store before they run.

The Fetcher passes events to the state machine of each parked request (`fetch_state`) and carries
out its actions: it reserves and releases blocks, starts fetches, admits requests, and fails those
that can never run. Parked requests cost the running batch nothing: an iteration of the loop looks
only at requests that had an event, at the oldest one that wants blocks and at due timers.

In: jobs, connector events, frames from the router. Out: calls of EngineCore.reserve and release, of
KVConnector.lookup and fetch, of RunningBatch.admit_job and fail_job.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from baton_decode_node.early_announcements import EarlyAnnouncements
from baton_decode_node.fetch_chooser import FetchChooser
from baton_decode_node.fetch_decision import FetchDecision
from baton_decode_node.fetch_state import FetchActions, FetchState, FetchTransition, LandedChunks
from baton_engine.interface import PADDING, Reservation
from baton_node.engine.chunk_sets import chunks_of, first_chunks, runs_of
from baton_node.engine.counters import BlockCounts
from baton_node.engine.job import FetchSummary, Job, JobKey
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.running_batch import RunningBatch
from baton_node.store.base import ChunkFetched
from baton_protocol.errors import BatonError
from baton_protocol.ids import BlockId
from baton_protocol.store import InboxEntry, Priority

# The slowest fetch rate that is waited for: missing bytes at this rate add to the timeout.
SLOW_BYTES_PER_S = 50e6

Wait = Literal["blocks", "lookup", "chunks"]


@dataclass(slots=True, eq=False)
class ParkedRequest:
    """One parked job."""

    job: Job
    state: FetchState
    priority: Priority  # of its fetches
    looking: bool = False  # its lookup is in flight
    decision: FetchDecision = field(default_factory=FetchDecision)  # about the chunks found
    fetched: int = 0  # chunks whose fetch succeeded, a bit set
    complete: int = 0  # chunks that were last fetched with the blocks of all groups, a bit set
    reservation: Reservation | None = None
    wait: tuple[float, Wait] | None = None  # deadline (by the clock), and what it waits for

    @property
    def uncached(self) -> int:
        """Prompt tokens that this node will compute, as far as known. 0 while a prefill node
        computes the prompt."""
        job, state = self.job, self.state
        if job.kind == "run" and state.awaits_first:
            return 0
        stored = state.exists | state.unneeded if state.exists else 0
        present = state.cached_blocks + self._blocks_of(chunks_of(stored))
        tokens = max(map(job.known_tokens, job.open_choices), default=0)
        return max(0, tokens - present * job.layout.block_size)

    def destination(self, chunk: int) -> tuple[BlockId, ...]:
        """Return the blocks to fetch a chunk into, in the order of its payload. Cached blocks are
        shared with other requests and must not be overwritten, so padding replaces them."""
        if self.reservation is None:
            raise RuntimeError(f"fetch of chunk {chunk} of {self.job.key} without blocks")
        size = self.job.layout.chunk_blocks
        blocks = self.job.chunk_of(self.reservation.blocks, chunk)
        cached = self.reservation.cached - chunk * size
        return tuple(PADDING if i % size < cached else block for i, block in enumerate(blocks))

    @property
    def window_runs(self) -> tuple[tuple[int, int], ...] | None:
        """The runs [start, end) of blocks that fetches have filled in all groups of layers. None if
        no group has a window."""
        layout = self.job.layout
        if layout.window is None or self.reservation is None:
            return None
        size, groups, full = layout.chunk_blocks, layout.num_groups, layout.num_full_groups
        blocks, windowed = self.reservation.blocks, 0
        for chunk in chunks_of(self.state.landed & self.complete):
            for i in range(max(chunk * size, self.reservation.cached), (chunk + 1) * size):
                # Padding: the engine needs no KV of the windows here.
                held = PADDING not in blocks[i * groups + full : (i + 1) * groups]
                windowed |= held << i
        return tuple((first, first + count) for first, count in runs_of(windowed))

    def summary(self, admission: LandedChunks | None) -> FetchSummary:
        """Return the block counts and predictions to report when the job leaves."""
        landed = chunks_of(self.state.landed) if admission is not None else ()
        blocks = BlockCounts(
            queried=self.job.full_blocks,
            matched=self.state.cached_blocks + self._blocks_of(self.job.markers),
            fetched=self._blocks_of(chunks_of(self.fetched)),
            used=self._blocks_of(landed),
            declined=self._blocks_of(chunks_of(self.decision.declined)),
        )
        decision = self.decision
        return FetchSummary(blocks, decision.fetch_ms, decision.compute_ms, self.state.lost)

    def _blocks_of(self, chunks: Iterable[int]) -> int:
        """Return how many blocks of these chunks are not in this node's cache."""
        size, cached = self.job.layout.chunk_blocks, self.state.cached_blocks
        return sum(max(0, (c + 1) * size - max(c * size, cached)) for c in chunks)


class Fetcher:
    """All parked requests of a node. Owned by the step loop's thread."""

    def __init__(self, context: LoopContext, batch: RunningBatch) -> None:
        self._engine = context.engine
        self._connector = context.connector
        self._counters = context.counters
        self._options = context.options
        self._clock = context.clock
        self._batch = batch
        self._chooser = FetchChooser(context)
        self._early = EarlyAnnouncements(context.clock)
        # Parked requests, and aborted ones that still have fetches in flight.
        self._parked: dict[JobKey, ParkedRequest] = {}
        # By Job.seq, the order of arrival: requests that want blocks, and that have some.
        self._wanting: dict[int, ParkedRequest] = {}
        self._holding: dict[int, ParkedRequest] = {}
        self._timers: list[tuple[float, int, JobKey]] = []  # heap of (deadline, seq, key)

    @property
    def empty(self) -> bool:
        return not self._parked

    @property
    def tokens(self) -> int:
        return sum(parked.uncached for parked in self._parked.values() if not parked.state.aborted)

    @property
    def early_entries(self) -> int:
        return len(self._early)

    def is_settling(self, key: JobKey) -> bool:
        parked = self._parked.get(key)
        return parked is not None and parked.state.aborted

    def park_job(self, job: Job, cached_blocks: int) -> None:
        # A prefill job waits for the lookup's answer, which decides what to publish: blocks can be
        # held for a put only right after the step that filled them.
        is_run, await_first = job.kind == "run", job.await_first
        state = FetchState(
            len(job.chunks),
            job.layout.chunk_blocks,
            awaits_first=await_first or not is_run,
            cached_blocks=cached_blocks,
            unneeded=job.unneeded if await_first else 0,
        )
        priority = Priority.HANDOFF if is_run and await_first else Priority.PREFIX
        parked = self._parked[job.key] = ParkedRequest(job, state, priority)
        parked.looking = (
            bool(state.missing_chunks and not await_first) if is_run else bool(job.chunks)
        )
        if parked.looking:
            self._connector.lookup(*job.key, job.chunks)
        self._apply(parked, parked.state.start())
        if is_run:
            for entry in self._early.take_entries(job.key):
                self.use_announcement(entry, is_early=False)
        elif not job.chunks:
            self._apply(parked, parked.state.know_first())

    def use_lookup(self, job: Job) -> None:
        parked = self._parked[job.key]
        parked.looking = False
        parked.decision = self._chooser.choose(job, parked.state.cached_blocks)
        decision = parked.decision
        self._apply(parked, parked.state.announce(decision.fetch, decision.unneeded))
        self._apply(parked, parked.state.end())
        if job.kind == "prefill":
            self._apply(parked, parked.state.know_first())

    def use_announcement(self, entry: InboxEntry, *, is_early: bool) -> None:
        parked = self._parked.get((entry.request, entry.attempt))
        if parked is None or parked.state.aborted:
            if is_early:
                self._early.add_entry(entry)
        elif parked.job.kind == "run":
            self._announce(parked, entry)

    def _announce(self, parked: ParkedRequest, entry: InboxEntry) -> None:
        if entry.kind != "chunks":
            self._apply(parked, parked.state.end())
            return
        job, chunks = parked.job, 0
        for index, marker in enumerate(entry.markers, start=entry.first):
            job.markers[index] = marker
            chunks |= job.suffices(index, marker) << index
        self._apply(parked, parked.state.announce(chunks))

    def settle_fetch(self, event: ChunkFetched) -> Job | None:
        key = (event.chunk.request, event.chunk.attempt)
        parked = self._parked.get(key)
        if parked is None:
            return None
        job, state, index = parked.job, parked.state, event.chunk.index
        if event.ok:
            parked.fetched |= 1 << index
            is_complete = event.bytes == job.complete_bytes
            parked.complete = parked.complete & ~(1 << index) | is_complete << index
            self._counters.add(fetched_chunks=1, fetched_bytes=event.bytes)
        else:
            self._counters.add(lost_chunks=1)
        job.times.fetch_ended = self._clock()
        self._apply(parked, state.land(index) if event.ok else state.lose(index))
        return job

    def know_first(self, job: Job) -> None:
        parked = self._parked[job.key]
        self._apply(parked, parked.state.know_first())

    def abort_job(self, job: Job) -> None:
        parked = self._parked[job.key]
        self._apply(parked, parked.state.abort())

    def grant_blocks(self) -> None:
        if not self._wanting:
            return
        # A request has one reservation: a newer attempt waits until the aborted attempt settles.
        held = {parked.job.request.id for parked in self._holding.values()}
        for parked in sorted(self._wanting.values(), key=self._order_of):
            if parked.job.request.id in held:
                continue
            try:
                reservation = self._engine.reserve(parked.job.request)
            except BatonError as error:
                self.abort_job(parked.job)
                self._batch.fail_job(parked.job, error)
                continue
            if reservation is None:
                return
            parked.reservation = reservation
            self._holding[parked.job.seq] = parked
            self._apply(parked, parked.state.reserve(reservation.cached))

    def _order_of(self, parked: ParkedRequest) -> tuple[int, int]:
        """The order in which jobs get blocks: that of the engine's policy."""
        by_priority = self._engine.scheduling.scheduling_policy == "priority"
        return parked.job.request.priority if by_priority else 0, parked.job.seq

    def give_blocks_back(self) -> None:
        if self._holding:
            parked = max(self._holding.values(), key=self._order_of)
            if not parked.state.returning:
                self._apply(parked, parked.state.give_back())

    def expire_waits(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            deadline, _, key = heapq.heappop(self._timers)
            parked = self._parked.get(key)
            if parked is not None and parked.wait is not None and parked.wait[0] == deadline:
                parked.wait = None
                self._apply(parked, parked.state.time_out())

    def next_deadline(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def _apply(self, parked: ParkedRequest, transition: FetchTransition) -> None:
        """Set the request's new state and carry out its actions."""
        parked.state, actions = transition
        self._rearm(parked)
        if actions.release:
            self._release(parked)
        self._fetch(parked, actions)
        if actions.admit is not None:
            self._leave(parked, actions.admit)
            self._counters.add(reused_chunks=actions.admit.chunks)
            window_runs = parked.window_runs
            reservation, parked.reservation = parked.reservation, None
            self._batch.admit_job(parked.job, reservation, actions.admit.runs, window_runs)
        if actions.forget:
            self._leave(parked)

    def _fetch(self, parked: ParkedRequest, actions: FetchActions) -> None:
        job = parked.job
        for chunk in actions.fetch:
            job.times.fetch_began = job.times.fetch_began or self._clock()
            self._connector.fetch(
                job.ref(chunk), job.markers[chunk], parked.destination(chunk), parked.priority
            )

    def _release(self, parked: ParkedRequest) -> None:
        reservation, parked.reservation = parked.reservation, None
        self._holding.pop(parked.job.seq, None)
        if reservation is not None:
            self._engine.release(reservation)

    def _leave(self, parked: ParkedRequest, admitted: LandedChunks | None = None) -> None:
        """Forget a request that was admitted or has ended. Called once per request."""
        job = parked.job
        job.fetched = parked.summary(admitted)
        self._counters.add_blocks(job.fetched.blocks)
        self._parked.pop(job.key, None)
        self._wanting.pop(job.seq, None)
        self._holding.pop(job.seq, None)
        parked.wait = None

    def _rearm(self, parked: ParkedRequest) -> None:
        """Update whether the request wants blocks, and set a timer if it waits for something
        new."""
        job = parked.job
        if parked.state.wants_blocks:
            self._wanting[job.seq] = parked
        else:
            self._wanting.pop(job.seq, None)
        wait = self._waits_for(parked)
        if wait is None:
            parked.wait = None
        elif parked.wait is None or parked.wait[1] != wait:
            deadline = self._clock() + self._wait_limit_s(parked, wait)
            parked.wait = (deadline, wait)
            heapq.heappush(self._timers, (deadline, job.seq, job.key))

    def _waits_for(self, parked: ParkedRequest) -> Wait | None:
        state = parked.state
        if state.over or state.aborted or state.awaits_first or state.expired:
            return None
        if state.wants_blocks:
            return "blocks"
        return "lookup" if parked.looking else "chunks"

    def _wait_limit_s(self, parked: ParkedRequest, wait: Wait) -> float:
        if wait == "blocks":
            return self._options.blocks_wait_s
        if wait == "lookup" or not (parked.state.flying or self._connector.healthy()):
            return self._options.lookup_wait_s  # unhealthy store: use the short timeout
        layout, missing = self._engine.info.layout, parked.state.missing_chunks
        early = (missing & first_chunks(parked.job.first_complete)).bit_count()
        size = early * layout.full_groups_bytes
        size += (missing.bit_count() - early) * layout.chunk_bytes
        return self._options.first_wait_s + size / SLOW_BYTES_PER_S
