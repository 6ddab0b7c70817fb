"""Does what the ledgers of prefill jobs say: puts chunks, announces them, ends the hand-off.

In: lookups' answers, progress of the step that just ran, how puts went. Out: Engine.hold/unhold and
KVConnector.publish/announce. Only the step loop's thread calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton_engine.api import Copied, Engine, KVConnector, LookedUp, Progress, Published
from baton_node import publishing
from baton_node.counters import Counters
from baton_node.jobs import Job, JobKey
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.store import InboxEntry

logger = logging.getLogger(__name__)
# A store that stands still is noticed at its first deadline. Until then what it has not taken for
# STILL_S may hold half of the pool and no more: the rest is for requests.
MAX_HELD_SHARE = 2
STILL_S = 1.0
BEHIND = "the store does not keep up"


class Publisher:
    """Keeps a job from its lookup until its end was announced."""

    def __init__(
        self,
        engine: Engine,
        connector: KVConnector,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._counters = counters
        self._jobs: dict[JobKey, Job] = {}
        self._clock = clock
        self._copying = 0  # chunks whose blocks are held
        self._moved_at = 0.0  # when one of them was copied, or the first of them held
        blocks, size = engine.info.num_blocks, engine.info.layout.chunk_blocks
        self._most_copying = max(1, blocks // MAX_HELD_SHARE // size)
        self._refused = False  # the last chunk was

    @property
    def empty(self) -> bool:
        """True when no job is open and no block is held."""
        return not self._jobs and self._copying == 0

    def open(self, job: Job) -> None:
        """A prefill job arrived. One without a full chunk ends here."""
        self._jobs[job.key] = job
        job.ledger = publishing.Ledger(len(job.chunks))
        if not job.chunks:
            self._tell(job, publishing.LookedUp(0))

    def looked_up(self, event: LookedUp) -> None:
        job = self._jobs.get((event.request, event.attempt))
        if job is None:
            return
        found = sum(1 << i for i, marker in enumerate(event.markers) if marker is not None)
        self._counters.announced_chunks += found.bit_count()
        self._tell(job, publishing.LookedUp(found))

    def missing(self, job: Job, chunk: int) -> None:
        """A chunk this job was to reuse is not in the store."""
        self._tell(job, publishing.Missing(chunk))

    def progressed(self, progress: Progress, job: Job) -> None:
        """Right after a step: what it filled is put now, before the blocks can be reused."""
        tokens = self._engine.info.layout.chunk_tokens
        self._tell(job, publishing.Computed(progress.computed // tokens), progress.blocks)

    def copied(self, event: Copied) -> None:
        self._copying -= 1
        self._moved_at = self._clock()
        self._engine.unhold(event.blocks)

    def published(self, event: Published) -> None:
        self._report(event.chunk.hash, event.reason if event.marker is None else "")
        if event.marker is not None:
            self._counters.published_chunks += 1
            self._counters.published_bytes += event.bytes
        job = self._jobs.get((event.chunk.request, event.chunk.attempt))
        if job is None:
            return
        if event.marker is not None:
            job.markers[event.chunk.index] = event.marker
        self._tell(job, publishing.Settled(event.chunk.index, event.marker is not None))

    def _report(self, chunk: BlockHash, refusal: str) -> None:
        """Say once that chunks are refused and once that they are not: a store that is down
        refuses thousands."""
        was_refused, self._refused = self._refused, bool(refusal)
        if refusal:
            level = logging.DEBUG if was_refused else logging.WARNING
            logger.log(level, "chunk %s was not published: %s", chunk.hex(), refusal)
        elif was_refused:
            logger.warning("chunks are published again, %s first", chunk.hex())

    def close(self, job: Job) -> None:
        """The job computes no more."""
        self._tell(job, publishing.Closed())

    def _tell(self, job: Job, event: publishing.Event, blocks: tuple[BlockId, ...] = ()) -> None:
        if job.ledger is None:
            return
        job.ledger, actions = publishing.step(job.ledger, event)
        refused: list[int] = []
        for action in actions:
            match action:
                case publishing.Publish(chunk):
                    if not self._publish(job, chunk, blocks):
                        refused.append(chunk)
                case publishing.Announce(first, count):
                    self._announce(job, "chunks", first, count)
                case publishing.End():
                    self._announce(job, "end", 0, 0)
                    self._jobs.pop(job.key, None)
        for chunk in refused:
            self._tell(job, publishing.Settled(chunk, False))

    def _publish(self, job: Job, chunk: int, blocks: tuple[BlockId, ...]) -> bool:
        """False, and nothing is held, where too much has been held for too long."""
        source = job.chunk_of(blocks, chunk)
        if len(source) != job.chunk_blocks:
            raise RuntimeError(f"put of chunk {chunk} of {job.key} outside a step's progress")
        now = self._clock()
        self._moved_at = self._moved_at if self._copying else now
        if self._copying >= self._most_copying and now - self._moved_at > STILL_S:
            self._report(job.chunks[chunk], BEHIND)
            return False
        self._engine.hold(source)
        self._copying += 1
        self._connector.publish(job.ref(chunk), source)
        return True

    def _announce(self, job: Job, kind: str, first: int, count: int) -> None:
        if job.inbox is None:
            return
        request, attempt = job.key
        if kind == "end":
            self._connector.announce(job.inbox, InboxEntry(request, attempt, "end"))
            return
        markers = tuple(job.markers[i] for i in range(first, first + count))
        entry = InboxEntry(request, attempt, "chunks", first, markers)
        self._connector.announce(job.inbox, entry)
