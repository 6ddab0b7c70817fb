"""Puts chunks into the store, and holds their blocks until their bytes are copied.

Publishing and write-behind share it. Only the step loop's thread calls it.
"""

from __future__ import annotations

import logging

from baton_node.engine.loop_context import LoopContext
from baton_node.store.base import ChunkRef, Copied, Published
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.store import Priority

logger = logging.getLogger(__name__)
MAX_HELD_SHARE = 2  # the divisor: puts may hold half of the block pool while the store stalls
STILL_S = 1.0


class OutgoingBlocks:
    """Puts chunks, and holds their blocks until their bytes are copied.

    In: chunks to put, right after the step that filled them. Out: calls of Engine.hold and unhold
    and of KVConnector.publish; counters; one log line when chunks are refused, and one when they
    are accepted again. Only the step loop's thread calls it.

    A stalled store is noticed only when a transfer misses its deadline. Until then puts may hold at
    most half of the block pool once no chunk has been copied for STILL_S: requests need the rest.

    `copying` is the number of chunks whose blocks are held now.
    """

    def __init__(self, context: LoopContext) -> None:
        self._engine = context.engine
        self._connector = context.connector
        self._counters = context.counters
        self._clock = context.clock
        self.copying = 0
        self._moved_at = 0.0  # when a chunk was last copied, or the first of these was held
        self._most_copying = self.share(MAX_HELD_SHARE)
        self._is_refusing = False  # the last put was refused

    def share(self, divisor: int) -> int:
        """Return the number of chunks that fill 1/divisor of the block pool, at least 1."""
        info = self._engine.info
        blocks = info.layout.chunk_blocks * info.layout.num_groups
        return max(1, info.num_blocks // divisor // blocks)

    def put(
        self,
        chunk: ChunkRef,
        source: tuple[BlockId, ...],
        priority: Priority,
        inbox: tuple[str, str] | None = None,
    ) -> bool:
        """Hold the blocks of a chunk and put it. Return False, and hold nothing, if the store
        stalls and puts already hold their share of the pool."""
        now = self._clock()
        self._moved_at = self._moved_at if self.copying else now
        if self.copying >= self._most_copying and now - self._moved_at > STILL_S:
            return False
        self._engine.hold(source)
        self.copying += 1
        self._connector.publish(chunk, source, priority, inbox)
        return True

    def copied(self, event: Copied) -> None:
        self.copying -= 1
        self._moved_at = self._clock()
        self._engine.unhold(event.blocks)

    def published(self, event: Published) -> None:
        if event.marker is None:
            self.refused(event.chunk.hash, event.reason)
            return
        self._counters.add(published_chunks=1, published_bytes=event.bytes)
        if self._is_refusing:
            self._is_refusing = False
            logger.warning(
                "the store accepts chunks again, starting with %s", event.chunk.hash.hex()
            )

    def refused(self, chunk: BlockHash, reason: str) -> None:
        """Log a refused put. Only the first is a warning: a store that is down refuses
        thousands."""
        level = logging.DEBUG if self._is_refusing else logging.WARNING
        self._is_refusing = True
        logger.log(level, "the store did not accept chunk %s: %s", chunk.hex(), reason)
