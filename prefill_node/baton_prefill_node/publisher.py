"""Hand-offs: prefill jobs' chunks on their way into the store and to the decode node's inbox.

It does what each job's state machine (`publish_state`) says: puts chunks, announces them, ends the
hand-off.

In: lookups' answers, what the step that just ran has filled, how puts went. Out: puts, and
KVConnector.announce of what was there and of ends. Implements Publishing.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.interface import Progress
from baton_node.engine.context import LoopContext
from baton_node.engine.job import Job, JobKey
from baton_node.engine.outgoing_blocks import OutgoingBlocks
from baton_node.store.base import LookedUp, Published
from baton_prefill_node.publish_state import Outcome, PublishState
from baton_protocol.ids import BlockId
from baton_protocol.store import InboxEntry, Priority

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
