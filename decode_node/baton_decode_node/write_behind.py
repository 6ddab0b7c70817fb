"""Write-behind: puts the chunks that whole requests compute into the store for later requests.

In: full chunks, right after the step that filled them. Out: puts of the lowest priority. No request
waits for them. Chunks are put with the blocks of all groups of layers (see KVLayout): nobody knows
yet where the request ends, and after a failover it needs the windows at its end. A chunk whose
blocks a window has left is put with those of the groups without a window, if there are any.

A chunk is skipped for good if the write-behind budget has no bandwidth for it, or
if puts of write-behind already hold an eighth of the block pool. A draining node lifts both limits:
it skips a chunk only if the store is down or has not taken held blocks for too long.
"""

from __future__ import annotations

from baton_engine.interface import PADDING, Filled
from baton_node.engine.job import Job, JobKey
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.outgoing_blocks import OutgoingBlocks
from baton_node.store.base import ChunkPublished, ChunkRef
from baton_protocol.ids import BlockHash
from baton_protocol.store import Priority

MAX_HELD_SHARE = 8  # the divisor: at most 1/8 of the block pool


class WriteBehind:
    """Puts filled chunks. It remembers which chunks of a job are stored until close_job(job)."""

    def __init__(self, context: LoopContext, outgoing: OutgoingBlocks) -> None:
        self._connector = context.connector
        self._outgoing = outgoing
        self._counters = context.counters
        self._layout = context.layout
        self._flying: set[BlockHash] = set()  # chunks whose put is in flight
        self._most_copying = outgoing.share_of_pool(MAX_HELD_SHARE)
        self._stored: dict[JobKey, set[BlockHash]] = {}
        self._draining = False
        self._watched: set[BlockHash] = set()

    @property
    def saved(self) -> bool:
        """True when every put in flight at the last watch_puts() has settled."""
        return self._watched.isdisjoint(self._flying)

    def watch_puts(self) -> None:
        self._watched = set(self._flying)

    def set_draining(self, draining: bool) -> None:
        """Start (True) or stop (False) to put chunks without limits of bandwidth and blocks."""
        self._draining = draining
        self._connector.set_draining(draining)

    def put_filled(self, filled: Filled, job: Job) -> None:
        """Put a chunk of a running job, unless the store holds it or its put is in flight."""
        source = filled.blocks
        if PADDING in source:
            source = source[: self._layout.num_full_groups * self._layout.chunk_blocks]
        size = len(source) * self._layout.stored_block_bytes
        stored = self._stored.setdefault(job.key, set())
        if filled.hash in stored or filled.hash in self._flying or _is_stored(filled, job, size):
            return
        if not size:
            return  # the store keeps nothing of it
        chunk = ChunkRef(*job.key, filled.index, filled.hash)
        if self._may_put(size) and self._outgoing.put_chunk(
            chunk, source, Priority.BEHIND, self._settle_put
        ):
            self._flying.add(chunk.hash)
        else:
            self._counters.add(behind_skipped=1)

    def close_job(self, job: Job) -> None:
        """The job has ended: forget which of its chunks are stored."""
        self._stored.pop(job.key, None)

    def _settle_put(self, event: ChunkPublished) -> None:
        self._flying.remove(event.chunk.hash)
        if event.marker is None:
            return
        self._counters.add(behind_chunks=1, behind_bytes=event.bytes)
        stored = self._stored.get((event.chunk.request, event.chunk.attempt))
        if stored is not None:
            stored.add(event.chunk.hash)

    def _may_put(self, size: int) -> bool:
        copying = self._outgoing.count_copying(Priority.BEHIND)
        room = self._draining or copying < self._most_copying
        return room and self._connector.take_behind(size)


def _is_stored(filled: Filled, job: Job, size: int) -> bool:
    """Return whether the store holds at least `size` bytes of the chunk: its marker was found, and
    no fetch has lost it."""
    index = filled.index
    if index not in job.markers or job.chunks[index] != filled.hash:
        return False
    return job.markers[index].payload_bytes >= size and not job.fetched.lost >> index & 1
