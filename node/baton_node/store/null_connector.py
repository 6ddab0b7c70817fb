"""The connector of a node without a store: it finds nothing and stores nothing.

In: the step loop's calls. Out: the same events as from a real connector, all of them negative.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from baton_node.store.base import (
    ChunkCopied,
    ChunkFetched,
    ChunkPublished,
    ChunkRef,
    ChunksLookedUp,
    ConnectorEvent,
)
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.store import DataInstance, InboxEntry, Marker, Priority, StoreHealth

WHY = "this node has no store"


class NoStore:
    """A KVConnector that settles each call at once."""

    def __init__(self) -> None:
        self._events: deque[ConnectorEvent] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def close(self) -> None:
        os.close(self._wake)

    def fileno(self) -> int:
        return self._wake

    def poll(self) -> list[ConnectorEvent]:
        events = list(self._events)
        self._events.clear()
        if events:
            os.eventfd_read(self._wake)
        return events

    def rates(self) -> tuple[float, float]:
        return 0.0, 0.0

    def instances(self) -> tuple[DataInstance, ...]:
        return ()

    def take_behind(self, size: int) -> bool:
        return False

    def set_draining(self, draining: bool) -> None:
        """Do nothing: there is no write-behind."""

    def healthy(self) -> bool:
        """Return False: nothing can be published."""
        return False

    def store_health(self) -> StoreHealth:
        return "none"

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        self._emit(ChunksLookedUp(request, attempt, (None,) * len(hashes)))

    def fetch(
        self, chunk: ChunkRef, marker: Marker, blocks: Sequence[BlockId], priority: Priority
    ) -> None:
        self._emit(ChunkFetched(chunk, False, 0, WHY))

    def publish(
        self,
        chunk: ChunkRef,
        blocks: Sequence[BlockId],
        priority: Priority,
        inbox: tuple[str, str] | None = None,
    ) -> None:
        self._emit(ChunkCopied(chunk, tuple(blocks)))
        self._emit(ChunkPublished(chunk, None, 0, WHY))

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        """Do nothing: without an index there are no inboxes."""

    def _emit(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._wake, 1)
