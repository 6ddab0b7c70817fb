"""Chunks on their way into the store: those of hand-offs, and those written behind.

Of prefill jobs it does what their ledgers say: puts chunks, announces them, ends the hand-off. What
whole requests fill goes to `write_behind`.

In: lookups' answers, what the step that just ran has filled, how puts went. Out: puts, and
KVConnector.announce of what was there and of ends. Only the step loop's thread calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton_engine.interface import Engine, Filled, Progress
from baton_node.engine.counters import Counters
from baton_node.engine.job import Job, JobKey
from baton_node.engine.outgoing_blocks import OutgoingBlocks
from baton_node.engine.publish_state import Outcome, PublishState
from baton_node.engine.write_behind import WriteBehind
from baton_node.store.base import Copied, KVConnector, LookedUp, Published
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.store import InboxEntry, Priority

logger = logging.getLogger(__name__)
TOO_SLOW = "the store does not keep up"


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
        self._puts = OutgoingBlocks(engine, connector, clock)
        self._behind = WriteBehind(engine, connector, self._puts, counters)
        self._refused = False  # the last chunk was

    @property
    def empty(self) -> bool:
        """True when no job is open, no block is held and every put has settled."""
        return not self._jobs and not self._puts.copying and self._behind.empty

    @property
    def saved(self) -> bool:
        """True when all that was on its way at the last watch() has settled."""
        return self._behind.saved

    @property
    def has_store(self) -> bool:
        """False where nothing can ever be published."""
        return self._connector.store_health() != "none"

    def open(self, job: Job) -> None:
        """A prefill job arrived. One without a full chunk ends here."""
        self._jobs[job.key] = job
        job.ledger = PublishState(len(job.chunks))
        if not job.chunks:
            self._apply(job, job.ledger.find(0))

    def looked_up(self, event: LookedUp) -> None:
        job = self._jobs.get((event.request, event.attempt))
        if job is None or job.ledger is None:
            return
        found = sum(1 << i for i, marker in enumerate(event.markers) if marker is not None)
        self._counters.announced_chunks += found.bit_count()
        self._apply(job, job.ledger.find(found))

    def missing(self, job: Job, chunk: int) -> None:
        """A chunk this job was to reuse is not in the store."""
        if job.ledger is not None:
            self._apply(job, job.ledger.miss(chunk))

    def progressed(self, progress: Progress, job: Job) -> None:
        """Right after a step: what it filled is put now, before the blocks can be reused."""
        if job.ledger is not None:
            chunks = progress.computed // self._engine.info.layout.chunk_tokens
            self._apply(job, job.ledger.compute(chunks), progress.blocks)

    def filled(self, filled: Filled, job: Job) -> None:
        """Right after a step too: a chunk of a whole request."""
        self._behind.filled(filled, job)

    def drain(self, draining: bool) -> None:
        """Whether to write behind whatever is filled from now on."""
        self._behind.drain(draining)

    def watch(self) -> None:
        """`saved` is about what is on its way now, for whole requests."""
        self._behind.watch()

    def copied(self, event: Copied) -> None:
        self._puts.copied(event)
        self._behind.copied(event)

    def published(self, event: Published) -> None:
        self._report(event.chunk.hash, event.reason if event.marker is None else "")
        self._behind.published(event)
        if event.marker is not None:
            self._counters.published_chunks += 1
            self._counters.published_bytes += event.bytes
        job = self._jobs.get((event.chunk.request, event.chunk.attempt))
        if job is not None and job.ledger is not None:
            self._apply(job, job.ledger.settle(event.chunk.index, event.marker is not None))

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
        self._behind.close(job)
        if job.ledger is not None:
            self._apply(job, job.ledger.close())

    def _apply(self, job: Job, outcome: Outcome, blocks: tuple[BlockId, ...] = ()) -> None:
        """The job's ledger becomes this, and this is done; `blocks` are those of its prompt."""
        job.ledger, actions = outcome
        for first, count in actions.announce:
            self._announce(job, "chunks", first, count)
        refused = [chunk for chunk in actions.publish if not self._publish(job, chunk, blocks)]
        if actions.end:
            self._announce(job, "end", 0, 0)
            self._jobs.pop(job.key, None)
        for chunk in refused:
            self._apply(job, job.ledger.settle(chunk, False))

    def _publish(self, job: Job, chunk: int, blocks: tuple[BlockId, ...]) -> bool:
        source = job.chunk_of(blocks, chunk)
        if len(source) != job.chunk_blocks:
            raise RuntimeError(f"put of chunk {chunk} of {job.key} outside a step's progress")
        # With nobody to be told of it, nobody waits for it either.
        priority = Priority.HANDOFF if job.inbox is not None else Priority.PREFIX
        if self._puts.put(job.ref(chunk), source, priority, job.inbox):
            return True
        self._report(job.chunks[chunk], TOO_SLOW)
        return False

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
