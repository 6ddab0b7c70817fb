"""Puts of chunks, and the blocks held for them until their bytes are copied.

In: chunks to put, right after the step that filled them. Out: Engine.hold/unhold and
KVConnector.publish. Only the step loop's thread calls it.

A store that stands still is noticed at its first deadline. Until then what it has not taken for
STILL_S may hold half of the pool and no more: the rest is for requests.
"""

from __future__ import annotations

from collections.abc import Callable

from baton_engine.interface import Engine
from baton_node.store.base import ChunkRef, Copied, KVConnector
from baton_protocol.ids import BlockId
from baton_protocol.store import Priority

MAX_HELD_SHARE = 2
STILL_S = 1.0


class OutgoingBlocks:
    """`copying` chunks hold their blocks now."""

    def __init__(self, engine: Engine, connector: KVConnector, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._connector = connector
        self._clock = clock
        self.copying = 0
        self._moved_at = 0.0  # when one of them was copied, or the first of them held
        self._most_copying = self.share(MAX_HELD_SHARE)

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
