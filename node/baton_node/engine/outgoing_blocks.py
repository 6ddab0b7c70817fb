"""Puts chunks into the store, and holds their blocks until their bytes are copied.

Publishing and write-behind share it. Only the step loop's thread calls it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton_node.engine.loop_context import LoopContext
from baton_node.store.base import ChunkCopied, ChunkPublished, ChunkRef
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.store import Priority

logger = logging.getLogger(__name__)
MAX_HELD_SHARE = 2  # the divisor: puts may hold half of the block pool while the store stalls
STILL_S = 1.0


@dataclass(slots=True, eq=False)
class OutgoingPut:
    """A put in flight. Its blocks are held while it is `copying`."""

    priority: Priority
    settle: Callable[[ChunkPublished], None]
    copying: bool = True


class OutgoingBlocks:
    """Puts chunks, and holds their blocks until their bytes are copied.

    In: chunks to put, right after the step that filled them. Out: calls of EngineCore.hold and
    unhold and of KVConnector.publish; the result of each put, for the object that asked for it;
    counters; one log line when chunks are refused, and one when they are accepted again.

    A stalled store is noticed only when a transfer misses its deadline. Until then puts may hold at
    most half of the block pool once no chunk has been copied for STILL_S: requests need the rest.
    """

    def __init__(self, context: LoopContext) -> None:
        self._engine = context.engine
        self._connector = context.connector
        self._counters = context.counters
        self._clock = context.clock
        self._puts: dict[ChunkRef, list[OutgoingPut]] = {}
        self._copying: Counter[Priority] = Counter()
        self._moved_at = 0.0  # when a chunk was last copied, or the first of these was held
        self._most_copying = self.share_of_pool(MAX_HELD_SHARE)
        self._is_refusing = False  # the last put was refused

    def share_of_pool(self, divisor: int) -> int:
        """Return the number of chunks that fill 1/divisor of the block pool, at least 1."""
        info = self._engine.info
        blocks = info.layout.chunk_blocks * info.layout.num_groups
        return max(1, info.num_blocks // divisor // blocks)

    @property
    def empty(self) -> bool:
        """True when no put is in flight."""
        return not self._puts

    def count_copying(self, priority: Priority) -> int:
        """Return the number of chunks of a priority whose blocks are held now."""
        return self._copying[priority]

    def put_chunk(
        self,
        chunk: ChunkRef,
        source: tuple[BlockId, ...],
        priority: Priority,
        settle: Callable[[ChunkPublished], None],
        inbox: tuple[str, str] | None = None,
    ) -> bool:
        """Hold the blocks of a chunk and put it; call `settle` with the result. Return False, and
        hold nothing, if the store stalls and puts already hold their share of the pool."""
        now, copying = self._clock(), self._copying.total()
        self._moved_at = self._moved_at if copying else now
        if copying >= self._most_copying and now - self._moved_at > STILL_S:
            return False
        self._engine.hold(source)
        self._copying[priority] += 1
        self._puts.setdefault(chunk, []).append(OutgoingPut(priority, settle))
        self._connector.publish(chunk, source, priority, inbox)
        return True

    def release_copied(self, event: ChunkCopied) -> None:
        """The bytes of a chunk's blocks are copied: release the blocks."""
        put = next(put for put in self._puts[event.chunk] if put.copying)
        put.copying = False
        self._copying[put.priority] -= 1
        self._moved_at = self._clock()
        self._engine.unhold(event.blocks)

    def settle_put(self, event: ChunkPublished) -> None:
        """A put has settled: count or log it, and pass the result on."""
        puts = self._puts[event.chunk]
        put = puts.pop(0)  # several puts of one chunk are in flight only if its job came twice
        if not puts:
            del self._puts[event.chunk]
        if event.marker is None:
            self.log_refusal(event.chunk.hash, event.reason)
        else:
            self._count_stored(event)
        put.settle(event)

    def log_refusal(self, chunk: BlockHash, reason: str) -> None:
        """Log a refused put. Only the first is a warning: a store that is down refuses
        thousands."""
        level = logging.DEBUG if self._is_refusing else logging.WARNING
        self._is_refusing = True
        logger.log(level, "the store did not accept chunk %s: %s", chunk.hex(), reason)

    def _count_stored(self, event: ChunkPublished) -> None:
        self._counters.add(published_chunks=1, published_bytes=event.bytes)
        if self._is_refusing:
            self._is_refusing = False
            logger.warning(
                "the store accepts chunks again, starting with %s", event.chunk.hash.hex()
            )
