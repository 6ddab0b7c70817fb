"""Publishing: puts the chunks of prefill jobs into the store and announces them to decode nodes.

Each job has a state machine (PublishState) that decides; the Publisher carries out its actions: it
puts chunks, announces chunks that already exist, and announces the end of the hand-off.

Layers with a window need little of the KV (see KVLayout). The decode node continues after the
prompt's last full chunk, so only the chunks that reach into the last `window` tokens before it are
put with the blocks of all groups. Of earlier chunks only the groups without a window are put; if
there is no such group, these chunks are neither put nor announced. A chunk that the store holds
with fewer groups than this prompt needs does not count as stored: it is put again, and the larger
value replaces the smaller one. A reader that has a marker of the other value finds another size,
which is a miss. A value with all groups serves every prompt.

In: lookup results, the progress of each step, and the results of puts. Out: puts through
OutgoingBlocks and calls of KVConnector.announce. Implements Publishing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton_engine.interface import PADDING, Progress
from baton_node.engine.job import Job, JobKey, LoopContext, chunks_of, first_chunks, runs_of
from baton_node.engine.running import OutgoingBlocks
from baton_node.store.base import LookedUp, Published
from baton_protocol.ids import BlockId
from baton_protocol.store import InboxEntry, Priority


@dataclass(frozen=True, slots=True)
class PublishActions:
    """What the Publisher does next, in the order of the fields."""

    announce: tuple[tuple[int, int], ...] = ()  # runs (first, count) of chunks already stored
    publish: tuple[int, ...] = ()  # chunks to put; hold their blocks before the next step
    end: bool = False  # announce that no more chunks follow; set once, as the last action


Outcome = tuple["PublishState", PublishActions]


@dataclass(frozen=True, slots=True)
class PublishState:
    """Pure state machine of one prefill job: which chunks to put, what to announce, when to end.

    It has one method per event: the lookup's result, computed chunks, the result of a put, the end
    of the job. Each returns the next state and the actions. Chunks that exist are announced at
    once. Other chunks are put as soon as a step has filled them or found them in the node's cache;
    the connector announces such a chunk once its value and marker are stored. `end` follows when no
    more chunks can come. A failed put ends the publishing of the job: the decode node computes the
    rest.

    Sets of chunks are bit sets in ints.
    """

    chunks: int  # number of full chunks in the prompt
    unneeded: int = 0  # chunks whose KV nobody needs, a bit set
    computed: int = 0  # number of leading chunks whose KV is in this node's blocks
    exists: int = 0  # chunks known to be in the store, a bit set
    flying: int = 0  # chunks whose put is in flight, a bit set
    looked_up: bool = False
    failed: bool = False  # a put has failed
    closed: bool = False  # the job computes no more
    ended: bool = False  # `end` was returned

    def find(self, chunks: int) -> Outcome:
        """The lookup found markers of these chunks (a bit set); 0 if the index is unreachable."""
        found = chunks & self._needed & ~self.exists
        return self._become(runs_of(found), exists=self.exists | found, looked_up=True)

    def compute(self, chunks: int) -> Outcome:
        """This node's blocks now hold the KV of the prompt's first `chunks` chunks."""
        return self._become(computed=max(self.computed, min(chunks, self.chunks)))

    def miss(self, chunk: int) -> Outcome:
        """The store has lost a chunk whose marker was found: put it again once computed."""
        return self._become(exists=self.exists & ~(1 << chunk))

    def settle(self, chunk: int, ok: bool) -> Outcome:
        """The put of a chunk has succeeded (`ok`) or failed."""
        bit = (1 << chunk) & self.flying
        return self._become(
            flying=self.flying & ~bit,
            failed=self.failed or not ok,
            exists=self.exists | (bit if ok else 0),
        )

    def close(self) -> Outcome:
        """The job has ended or was aborted: it computes no more chunks."""
        return self._become(closed=True)

    @property
    def _needed(self) -> int:
        return first_chunks(self.chunks) & ~self.unneeded

    def _become(self, announce: tuple[tuple[int, int], ...] = (), **changes: Any) -> Outcome:
        """Return the state with these changes, and the actions. After `end` there are none."""
        if self.ended:
            return self, PublishActions()
        return replace(self, **changes)._advance(announce)

    def _advance(self, announce: tuple[tuple[int, int], ...]) -> Outcome:
        due = 0
        if self.looked_up and not self.failed and not self.closed:
            due = first_chunks(self.computed) & self._needed & ~self.exists & ~self.flying
        flying = self.flying | due
        # Even if all chunks exist from the start, wait until the prompt is computed: a chunk may
        # turn out to be missing, and an earlier end would not make the first token come earlier.
        complete = self.computed == self.chunks and self.exists == self._needed
        complete = complete and self.looked_up
        ended = not flying and (complete or self.failed or self.closed)
        state = replace(self, flying=flying, ended=ended)
        return state, PublishActions(announce, chunks_of(due), ended)


TOO_SLOW = "the store is too slow: too many blocks wait to be copied"
TOO_LATE = "the engine has released its blocks of layers with a window"


@dataclass(slots=True, eq=False)
class OpenJob:
    """A prefill job and the state of its publishing."""

    job: Job
    state: PublishState


class Publisher:
    """Publishes prefill jobs. It keeps a job until the job's end is announced."""

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
        """Start to publish a job. A job without a full chunk ends at once."""
        opened = self._jobs[job.key] = OpenJob(job, PublishState(len(job.chunks), job.unneeded))
        if not job.chunks:
            self._apply(opened, opened.state.find(0))

    def looked_up(self, event: LookedUp) -> None:
        opened = self._jobs.get((event.request, event.attempt))
        if opened is not None:
            job, markers = opened.job, enumerate(event.markers)
            found = sum(1 << i for i, marker in markers if marker and job.suffices(i, marker))
            self._counters.announced_chunks += (found & ~job.unneeded).bit_count()
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
        """Set the job's new state and carry out its actions. `blocks` are the prompt's blocks."""
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
        size, source = self._layout.chunk_blocks, job.chunk_of(blocks, chunk)
        if len(source) != size * self._layout.num_groups:
            raise RuntimeError(f"put of chunk {chunk} of {job.key} outside a step's progress")
        if chunk < job.first_complete:
            source = source[: size * self._layout.num_full_groups]
        # Without an inbox no decode node waits for the chunk.
        priority = Priority.HANDOFF if job.inbox is not None else Priority.PREFIX
        if PADDING in source:
            self._outgoing.refused(job.chunks[chunk], TOO_LATE)
            return False
        if self._outgoing.put(job.ref(chunk), source, priority, job.inbox):
            return True
        self._outgoing.refused(job.chunks[chunk], TOO_SLOW)
        return False

    def _announce(self, job: Job, entry: InboxEntry) -> None:
        if job.inbox is not None:
            self._connector.announce(job.inbox, entry)
