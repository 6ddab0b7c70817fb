"""Puts of chunks, and the blocks held for them until their bytes are copied.

In: chunks to put, right after the step that filled them. Out: Engine.hold/unhold and
KVConnector.publish; counters; one line in the log when chunks are refused, one when they are not
any more. Only the step loop's thread calls it.

A store that stands still is noticed at its first deadline. Until then what it has not taken for
STILL_S may hold half of the pool and no more: the rest is for requests.
"""

from __future__ import annotations

import logging

from baton_node.engine.context import LoopContext
from baton_node.store.base import ChunkRef, Copied, Published
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.store import Priority

logger = logging.getLogger(__name__)
MAX_HELD_SHARE = 2
STILL_S = 1.0


class OutgoingBlocks:
    """`copying` chunks hold their blocks now."""

    def __init__(self, context: LoopContext) -> None:
        self._engine = context.engine
        self._connector = context.connector
        self._counters = context.counters
        self._clock = context.clock
        self.copying = 0
        self._moved_at = 0.0  # when one of them was copied, or the first of them held
        self._most_copying = self.share(MAX_HELD_SHARE)
        self._is_refusing = False  # the last chunk was refused

    def share(self, divisor: int) -> int:
        """Chunks that make up 1/divisor of the pool, at least one."""
        info = self._engine.info
        return max(1, info.num_blocks // divisor // info.layout.chunk_blocks)

    def put(
        self,
        chunk: ChunkRef,
        source: tuple[BlockId, ...],
        priority: Priority,
        inbox: tuple[str, str] | None = None,
    ) -> bool:
        """False, and nothing is held, where too much has been held for too long."""
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
        self._counters.published_chunks += 1
        self._counters.published_bytes += event.bytes
        if self._is_refusing:
            self._is_refusing = False
            logger.warning("chunks are published again, %s first", event.chunk.hash.hex())

    def refused(self, chunk: BlockHash, reason: str) -> None:
        """Warn of the first only: a store that is down refuses thousands."""
        level = logging.DEBUG if self._is_refusing else logging.WARNING
        self._is_refusing = True
        logger.log(level, "chunk %s was not published: %s", chunk.hex(), reason)
