"""KVConnector over baton_kvstore: transfer threads beside the memory, one control thread.

    chunks      DataPlane's threads send from and receive into KVMemory, where it has views, and
                copy between it and their staging buffers where it has none
    the index   `index_client`, an asyncio loop of its own: lookups, markers, inboxes
    the caller  the step loop; it never blocks here. Results wait in a deque, an eventfd wakes it

In: calls of the step loop. Out: ConnectorEvents through poll(), each call settled exactly once:
a publish gives Copied and then Published, a fetch Fetched, a lookup LookedUp, whatever fails.

A store in trouble costs no time: what its index or all data servers would have to do is refused at
once, and what is in flight settles at its deadline. Both are watched; see healthy().
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence

from baton_engine.interface import KVMemory
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.transfers import GetResult, PutResult, Tuning
from baton_kvstore.index.markers import Index
from baton_node.store.base import PADDING, ChunkRef, ConnectorEvent, Copied, Fetched, Published
from baton_node.store.index_client import IndexClient, StoreAddress, Stored
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance, InboxEntry, Marker, Priority, StoreHealth

logger = logging.getLogger(__name__)


class StoreConnector:
    """Make it, start() it, close() it in the step loop's thread."""

    def __init__(
        self,
        address: StoreAddress,
        memory: KVMemory,
        connect: Callable[[str, str], Index] = Index,
        tuning: Tuning | None = None,
    ) -> None:
        self._memory = memory
        self._layout: KVLayout = memory.layout
        self._events: deque[ConnectorEvent] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._plane = DataPlane(
            address.data_urls,
            memory.layout,
            address.fingerprint,
            address.epoch,
            write_behind_bandwidth=address.write_behind_bandwidth,
            settings=address.settings,
            tuning=tuning,
        )
        self._index = IndexClient(address, self._emit, self._runs, connect)
        self._closed = False

    @property
    def plane(self) -> DataPlane:
        return self._plane

    def start(self) -> None:
        self._plane.start()
        self._index.start()

    def close(self) -> None:
        """Settle what is in flight and end the threads."""
        if not self._closed:
            self._closed = True
            self._plane.close()
            self._index.close()
            os.close(self._wake)

    # --- the step loop's side -------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake

    def poll(self) -> list[ConnectorEvent]:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def rates(self) -> tuple[float, float]:
        """Put and get, bytes per second as measured; 0.0 before that."""
        return self._plane.put_bytes_per_s, self._plane.get_bytes_per_s

    def instances(self) -> tuple[DataInstance, ...]:
        return self._plane.instances()

    def take_behind(self, size: int) -> bool:
        return not self._trouble() and self._plane.take_behind(size)

    def drain(self, draining: bool) -> None:
        self._plane.draining = draining

    def healthy(self) -> bool:
        """Whether chunks can be published now: the index answers and takes writes, and a data
        server takes chunks. Any thread may ask."""
        return not self._trouble()

    def store_health(self) -> StoreHealth:
        return "up" if self.healthy() else "down"

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        self._index.lookup(request, attempt, hashes)

    def fetch(
        self, chunk: ChunkRef, marker: Marker, blocks: Sequence[BlockId], priority: Priority
    ) -> None:
        """Leading blocks given as padding hold their KV already and are not written; with no other
        blocks a fetch only measures the server. The others may hold anything until it has settled,
        and keep it unless all is well. A chunk that is not what its marker says loses it."""
        keep = sum(1 for block in blocks if block == PADDING)
        offset = keep * self._layout.block_bytes // self._layout.kv_shards
        targets = tuple(blocks[keep:])
        views = self._memory.views(targets)
        direct = None if views is None else [*[None] * keep, *views]

        def sink(payload: memoryview, shard: int) -> None:
            if targets:
                self._memory.write(targets, payload[offset:], shard)

        def done(result: GetResult) -> None:
            self._emit(Fetched(chunk, result.ok, result.bytes, result.reason))
            if result.ok:
                self._index.refresh(chunk)
            if result.gone:
                logger.debug("chunk %s is not to be used: %s", chunk.hash.hex(), result.reason)
                self._index.unmark(chunk.hash, marker)

        self._plane.submit_get(chunk.hash, marker, chunk.index, sink, done, priority, direct)

    def publish(
        self,
        chunk: ChunkRef,
        blocks: Sequence[BlockId],
        priority: Priority,
        inbox: tuple[str, str] | None = None,
    ) -> None:
        source = tuple(blocks)
        if trouble := self._trouble():
            self._emit(Copied(chunk, source))
            self._emit(Published(chunk, None, 0, trouble))
            return

        def fill(payload: memoryview, shard: int) -> None:
            self._memory.read(source, payload, shard)

        def copied() -> None:
            self._emit(Copied(chunk, source))

        def done(result: PutResult) -> None:
            if result.marker is None:
                self._emit(Published(chunk, None, 0, result.reason))
            else:
                self._index.mark(Stored(chunk, result.marker, result.bytes, inbox))

        tokens, direct = self._layout.chunk_tokens, self._memory.views(source)
        self._plane.submit_put(
            chunk.hash, tokens, chunk.index, fill, copied, done, priority, direct
        )

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        self._index.announce(inbox, entry)

    # --- any thread ----------------------------------------------------------------------------

    def _trouble(self) -> str:
        """Why nothing can be published; "" if it can."""
        troubles = self._plane.put_troubles
        return self._index.trouble or (troubles[0] if all(troubles) else "")

    def _runs(self) -> list[str | None]:
        """Per data server its run id, "" where it is not known yet, None where it is away."""
        plane = self._plane
        return [
            None if trouble else run_id
            for run_id, trouble in zip(plane.run_ids, plane.troubles, strict=True)
        ]

    def _emit(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        if not self._closed:
            os.eventfd_write(self._wake, 1)


__all__ = ["StoreAddress", "StoreConnector"]
