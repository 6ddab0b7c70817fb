"""Publish, then fetch: what a hand-off without any overlap takes.

In: a store, a memory, a number of chunks. Out: seconds until all are stored and marked, and seconds
until all are back in blocks. The connector is a node's.
"""

from __future__ import annotations

import os
import select
import time

from baton_engine.interface import StoredMemory
from baton_node.store.address import StoreAddress
from baton_node.store.base import ChunkFetched, ChunkPublished, ChunkRef, ConnectorEvent
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.store import Marker, Priority

PATIENCE_S = 60.0


class OneAfterTheOther:
    """As many chunks at a time as the memory has blocks for; each time new ones."""

    def __init__(self, address: StoreAddress, memory: StoredMemory) -> None:
        self._size = memory.layout.chunk_blocks
        self._connector = StoreConnector(address, memory)
        self._connector.start()
        if not self._connector.plane.wait_connected(PATIENCE_S):
            raise SystemExit("no connection to the store")

    def seconds(self, count: int) -> tuple[float, float]:
        """Of the publish and of the fetch."""
        chunks = [
            ChunkRef(RequestId("sequence"), 0, n, BlockHash(os.urandom(16))) for n in range(count)
        ]
        began = time.perf_counter()
        for chunk in chunks:
            self._connector.publish(chunk, self._blocks(chunk), Priority.HANDOFF)
        markers = self._published(count)
        between = time.perf_counter()
        for chunk in chunks:
            marker = markers[chunk.index]
            self._connector.fetch(chunk, marker, self._blocks(chunk), Priority.HANDOFF)
        self._fetched(count)
        return between - began, time.perf_counter() - between

    def close(self) -> None:
        self._connector.close()

    def _blocks(self, chunk: ChunkRef) -> tuple[BlockId, ...]:
        first = 1 + chunk.index * self._size
        return tuple(BlockId(first + i) for i in range(self._size))

    def _published(self, count: int) -> dict[int, Marker]:
        markers: dict[int, Marker] = {}
        while len(markers) < count:
            for event in self._events():
                if isinstance(event, ChunkPublished):
                    if event.marker is None:
                        raise SystemExit(f"a publish failed: {event.reason}")
                    markers[event.chunk.index] = event.marker
        return markers

    def _fetched(self, count: int) -> None:
        while count:
            for event in self._events():
                if isinstance(event, ChunkFetched):
                    if not event.ok:
                        raise SystemExit(f"a fetch failed: {event.reason}")
                    count -= 1

    def _events(self) -> list[ConnectorEvent]:
        ready, _, _ = select.select([self._connector.fileno()], [], [], PATIENCE_S)
        if not ready:
            raise SystemExit("the store did not answer")
        return self._connector.poll()
