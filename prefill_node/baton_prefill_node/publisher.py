"""Publishing: puts the chunks of prefill jobs into the store and announces them to decode nodes.

Each job has a state machine (PublishState) that decides; the Publisher carries out its actions: it
puts chunks, announces chunks that already exist, and announces the end of the hand-off.

Layers with a window need little of the KV (see KVLayout). The decode node continues after the
prompt's last full chunk, so only the chunks that reach into the last `window` tokens before it are
put with the blocks of all groups. Of earlier chunks only the groups without a window are put; if
there is no such group, these chunks are neither put nor announced. A chunk that the store holds
with fewer groups than this prompt needs does not count as stored: it is put again, and the larger
value replaces the smaller one. A reader that has a marker of the other value finds another size,
which is a miss. A value with all groups serves every prompt. A job that pins a prefix also puts
chunks again that would expire before its end.

In: jobs with the markers that their lookup found, the progress of each step, and the results of
puts. Out: puts through OutgoingBlocks and calls of KVConnector.announce.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.interface import PADDING, Progress
from baton_node.engine.job import Job, JobKey
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.outgoing_blocks import OutgoingBlocks
from baton_node.store.base import ChunkPublished
from baton_prefill_node.publish_state import PublishState, PublishTransition
from baton_protocol.ids import BlockId
from baton_protocol.store import InboxEntry, Priority

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

    def has_job(self, key: JobKey) -> bool:
        return key in self._jobs

    def open_job(self, job: Job) -> None:
        """Start to publish a job. A job without a full chunk ends at once."""
        opened = self._jobs[job.key] = OpenJob(job, PublishState(len(job.chunks), job.unneeded))
        if not job.chunks:
            self._apply(opened, opened.state.find(0))

    def use_lookup(self, job: Job) -> None:
        if opened := self._jobs.get(job.key):
            markers = job.markers.items()
            stored = sum(
                1 << i
                for i, marker in markers
                if job.suffices(i, marker) and marker.kept_until >= job.kept_until
            )
            self._counters.add(announced_chunks=(stored & ~job.unneeded).bit_count())
            self._apply(opened, opened.state.find(stored))

    def put_again(self, job: Job, chunk: int) -> None:
        if opened := self._jobs.get(job.key):
            self._apply(opened, opened.state.miss(chunk))

    def publish_progress(self, progress: Progress, job: Job) -> None:
        if opened := self._jobs.get(job.key):
            chunks = progress.computed // self._layout.chunk_tokens
            self._apply(opened, opened.state.compute(chunks), progress.blocks)

    def close_job(self, job: Job) -> None:
        if opened := self._jobs.get(job.key):
            self._apply(opened, opened.state.close())

    def _settle_put(self, event: ChunkPublished) -> None:
        if opened := self._jobs.get((event.chunk.request, event.chunk.attempt)):
            self._apply(opened, opened.state.settle(event.chunk.index, event.marker is not None))

    def _apply(
        self, opened: OpenJob, transition: PublishTransition, blocks: tuple[BlockId, ...] = ()
    ) -> None:
        """Set the job's new state and carry out its actions. `blocks` are the prompt's blocks."""
        opened.state, actions = transition
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
            self._outgoing.log_refusal(job.chunks[chunk], TOO_LATE)
            return False
        if self._outgoing.put_chunk(job.ref(chunk), source, priority, self._settle_put, job.inbox):
            return True
        self._outgoing.log_refusal(job.chunks[chunk], TOO_SLOW)
        return False

    def _announce(self, job: Job, entry: InboxEntry) -> None:
        if job.inbox is not None:
            self._connector.announce(job.inbox, entry)
