"""Hand-offs: prefill jobs' chunks on their way into the store and to the decode node's inbox.

It does what each job's state machine (PublishState) says: puts chunks, announces them, ends the
hand-off.

In: lookups' answers, what the step that just ran has filled, how puts went. Out: puts, and
KVConnector.announce of what was there and of ends. Implements Publishing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton_engine.interface import Progress
from baton_node.engine.job import Job, JobKey, LoopContext, chunks_of, first_chunks, runs_of
from baton_node.engine.running import OutgoingBlocks
from baton_node.store.base import LookedUp, Published
from baton_protocol.ids import BlockId
from baton_protocol.store import InboxEntry, Priority


@dataclass(frozen=True, slots=True)
class PublishActions:
    """What the step loop does now, in the order of the fields."""

    announce: tuple[tuple[int, int], ...] = ()  # (first, count) of chunks that exist
    publish: tuple[int, ...] = ()  # hold their blocks before the next step, put them, announce them
    end: bool = False  # tell the decode node that no more will come; once, and last


Outcome = tuple["PublishState", PublishActions]


@dataclass(frozen=True, slots=True)
class PublishState:
    """Which chunks of a prefill job are put into the store, announced, and when the job has ended.

    Pure. In: what the lookup found, how far the prompt is computed, how each put went; one method
    each. Out: the next state, and what the step loop does now. Chunks that exist are announced at
    once; the others are put as soon as a step has filled them (or found them in the node's own
    cache). Who puts them also announces them, as soon as the store has acknowledged value and
    marker. `end` follows when nothing more will come. A failed put ends the publishing of this job:
    the decode node computes from there.

    One prefill job's chunks, as bit sets. `computed` is a count.
    """

    chunks: int
    computed: int = 0
    exists: int = 0
    flying: int = 0
    looked_up: bool = False
    failed: bool = False
    closed: bool = False
    ended: bool = False

    def find(self, chunks: int) -> Outcome:
        """The lookup found a marker of these chunks (a bit set); 0 where the index is out of
        reach."""
        found = chunks & first_chunks(self.chunks) & ~self.exists
        return self._become(runs_of(found), exists=self.exists | found, looked_up=True)

    def compute(self, chunks: int) -> Outcome:
        """The prompt's first `chunks` full chunks are in this node's blocks now."""
        return self._become(computed=max(self.computed, min(chunks, self.chunks)))

    def miss(self, chunk: int) -> Outcome:
        """A chunk whose marker was seen is not there after all: it is put again once computed."""
        return self._become(exists=self.exists & ~(1 << chunk))

    def settle(self, chunk: int, ok: bool) -> Outcome:
        """A put has ended."""
        bit = (1 << chunk) & self.flying
        return self._become(
            flying=self.flying & ~bit,
            failed=self.failed or not ok,
            exists=self.exists | (bit if ok else 0),
        )

    def close(self) -> Outcome:
        """No more will be computed for this job (it has ended, or was aborted)."""
        return self._become(closed=True)

    def _become(self, announce: tuple[tuple[int, int], ...] = (), **changes: Any) -> Outcome:
        """The state with these changes, and what to do now. After `end` nothing comes any more."""
        if self.ended:
            return self, PublishActions()
        return replace(self, **changes)._advance(announce)

    def _advance(self, announce: tuple[tuple[int, int], ...]) -> Outcome:
        due = 0
        if self.looked_up and not self.failed and not self.closed:
            due = first_chunks(self.computed) & ~self.exists & ~self.flying
        flying = self.flying | due
        # Not before the prompt is computed, though all chunks may exist from the start: one of them
        # may turn out to be missing, and the first token comes no sooner.
        complete = self.computed == self.chunks and self.exists == first_chunks(self.chunks)
        complete = complete and self.looked_up
        ended = not flying and (complete or self.failed or self.closed)
        state = replace(self, flying=flying, ended=ended)
        return state, PublishActions(announce, chunks_of(due), ended)


TOO_SLOW = "the store does not keep up"


@dataclass(slots=True, eq=False)
class OpenJob:
    """A prefill job, and how far its chunks are."""

    job: Job
    state: PublishState


class Publisher:
    """Keeps a job from its arrival until its end was announced."""

    def __init__(self, context: LoopContext, outgoing: OutgoingBlocks) -> None:
        self._connector = context.connector
        self._counters = context.counters
        self._layout = context.layout
        self._outgoing = outgoing
        self._jobs: dict[JobKey, OpenJob] = {}

    @property
    def empty(self) -> bool:
        return not self._jobs

    def open(self, job: Job) -> None:
        """A job without a full chunk ends here."""
        opened = self._jobs[job.key] = OpenJob(job, PublishState(len(job.chunks)))
        if not job.chunks:
            self._apply(opened, opened.state.find(0))

    def looked_up(self, event: LookedUp) -> None:
        opened = self._jobs.get((event.request, event.attempt))
        if opened is not None:
            found = sum(1 << i for i, marker in enumerate(event.markers) if marker is not None)
            self._counters.announced_chunks += found.bit_count()
            self._apply(opened, opened.state.find(found))

    def missing(self, job: Job, chunk: int) -> None:
        if opened := self._jobs.get(job.key):
            self._apply(opened, opened.state.miss(chunk))

    def progressed(self, progress: Progress, job: Job) -> None:
        if opened := self._jobs.get(job.key):
            chunks = progress.computed // self._layout.chunk_tokens
            self._apply(opened, opened.state.compute(chunks), progress.blocks)

    def published(self, event: Published) -> None:
        if opened := self._jobs.get((event.chunk.request, event.chunk.attempt)):
            self._apply(opened, opened.state.settle(event.chunk.index, event.marker is not None))

    def close(self, job: Job) -> None:
        if opened := self._jobs.get(job.key):
            self._apply(opened, opened.state.close())

    def _apply(self, opened: OpenJob, outcome: Outcome, blocks: tuple[BlockId, ...] = ()) -> None:
        """The job's state becomes this, and this is done; `blocks` are those of its prompt."""
        opened.state, actions = outcome
        job = opened.job
        for first, count in actions.announce:
            markers = tuple(job.markers[i] for i in range(first, first + count))
            self._announce(job, InboxEntry(*job.key, "chunks", first, markers))
        refused = [chunk for chunk in actions.publish if not self._publish(job, chunk, blocks)]
        if actions.end:
            self._announce(job, InboxEntry(*job.key, "end"))
            self._jobs.pop(job.key, None)
        for chunk in refused:
            self._apply(opened, opened.state.settle(chunk, False))

    def _publish(self, job: Job, chunk: int, blocks: tuple[BlockId, ...]) -> bool:
        source = job.chunk_of(blocks, chunk)
        if len(source) != self._layout.chunk_blocks:
            raise RuntimeError(f"put of chunk {chunk} of {job.key} outside a step's progress")
        # With nobody to be told of it, nobody waits for it either.
        priority = Priority.HANDOFF if job.inbox is not None else Priority.PREFIX
        if self._outgoing.put(job.ref(chunk), source, priority, job.inbox):
            return True
        self._outgoing.refused(job.chunks[chunk], TOO_SLOW)
        return False

    def _announce(self, job: Job, entry: InboxEntry) -> None:
        if job.inbox is not None:
            self._connector.announce(job.inbox, entry)
