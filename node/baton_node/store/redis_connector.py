"""KVConnector over baton_kvstore, with transfer threads and one control thread.

    chunks      the DataPlane's threads send from StoredMemory and receive into it; where it
                has no views, they copy between it and their staging buffers
    the index   `index_client`: lookups, markers and inboxes, in an asyncio loop of its own thread
    the caller  the step loop, which never blocks here; results wait in a deque and an eventfd wakes
                the loop

In: the step loop's calls. Out: ConnectorEvents through poll(). Each call settles exactly once,
whatever fails: a publish with ChunkCopied and then ChunkPublished, a fetch with
ChunkFetched, a lookup with ChunksLookedUp.

A store in trouble does not delay requests: operations on an index or on data servers that are down
are refused at once, and those in flight settle by their deadline. See healthy().
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from baton_engine.interface import PADDING, StoredMemory
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.transfers import GetResult, PutResult
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.index.markers import Index
from baton_node.store.address import StoreAddress
from baton_node.store.base import (
    ChunkCopied,
    ChunkFetched,
    ChunkPublished,
    ChunkRef,
    ConnectorEvent,
)
from baton_node.store.index_client import IndexClient, Stored
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance, InboxEntry, Marker, Priority, StoreHealth

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """Consecutive blocks of a chunk, the bytes of a head shard that are theirs, and their group
    (see StoredMemory)."""

    blocks: Sequence[BlockId]
    bytes: slice
    group: int


class StoreConnector:
    """KVConnector over a store. Create, start() and close() it in the step loop's thread.

    The constructor raises StoreMisconfigured for an invalid URL or layout. `connect` makes an index
    client from an index URL and a pool name.
    """

    def __init__(
        self,
        address: StoreAddress,
        memory: StoredMemory,
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
        """Settle all operations in flight and end the threads."""
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
        """Return the measured put and get rates in bytes per second; 0.0 until measured."""
        return self._plane.put_bytes_per_s, self._plane.get_bytes_per_s

    def instances(self) -> tuple[DataInstance, ...]:
        return self._plane.instances()

    def take_behind(self, size: int) -> bool:
        return not self._trouble() and self._plane.take_behind(size)

    def set_draining(self, draining: bool) -> None:
        self._plane.draining = draining

    def healthy(self) -> bool:
        """Return whether chunks can be published now: the index answers and accepts writes, and at
        least one data server accepts chunks. Any thread may call it."""
        return not self._trouble()

    def store_health(self) -> StoreHealth:
        return "up" if self.healthy() else "down"

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        self._index.lookup(request, attempt, hashes)

    def fetch(
        self, chunk: ChunkRef, marker: Marker, blocks: Sequence[BlockId], priority: Priority
    ) -> None:
        """Fetch a chunk into `blocks`, which are in the order of its payload.

        If the value has only the first blocks, the others stay as they are. Padding blocks stand
        for blocks that already hold their KV, or that the request does not need: they are not
        written. A fetch into padding only measures the server. The blocks that are written hold
        undefined bytes until the fetch has settled, and after it unless it is ok. If the store does
        not hold the chunk that the marker describes, the marker is dropped.
        """
        stored = tuple(blocks[: marker.payload_bytes // self._layout.stored_block_bytes])
        runs = [run for run in self._runs_of(stored) if run.blocks[0] != PADDING]
        views = self._memory.views([block for block in stored if block != PADDING])
        direct: list[memoryview | None] | None = None
        if views is not None:
            given = iter(views)
            direct = [None if block == PADDING else next(given) for block in stored]

        def sink(payload: memoryview, shard: int) -> None:
            for run in runs:
                self._memory.write(run.blocks, payload[run.bytes], shard, run.group)

        def done(result: GetResult) -> None:
            self._emit(ChunkFetched(chunk, result.ok, result.bytes, result.reason))
            if result.ok:
                self._index.refresh(chunk, marker)
            if result.gone:
                logger.debug("not using chunk %s: %s", chunk.hash.hex(), result.reason)
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
        runs = self._runs_of(source)
        if trouble := self._trouble():
            self._emit(ChunkCopied(chunk, source))
            self._emit(ChunkPublished(chunk, None, 0, trouble))
            return

        def fill(payload: memoryview, shard: int) -> None:
            for run in runs:
                self._memory.read(run.blocks, payload[run.bytes], shard, run.group)

        def copied() -> None:
            self._emit(ChunkCopied(chunk, source))

        def done(result: PutResult) -> None:
            if result.marker is None:
                self._emit(ChunkPublished(chunk, None, 0, result.reason))
            else:
                self._index.mark(Stored(chunk, result.marker, result.bytes, inbox))

        layout, direct = self._layout, self._memory.views(source)
        size = len(source) * layout.stored_block_bytes
        self._plane.submit_put(
            *(chunk.hash, layout.chunk_tokens, chunk.index, fill, copied, done, priority),
            direct=direct,
            payload_bytes=size,
            kept_until=chunk.kept_until,
        )

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        self._index.announce(inbox, entry)

    # --- any thread ----------------------------------------------------------------------------

    def _trouble(self) -> str:
        """Why nothing can be published now, "" if chunks can be."""
        troubles = self._plane.put_troubles
        return self._index.trouble or (troubles[0] if all(troubles) else "")

    def _runs_of(self, blocks: Sequence[BlockId]) -> list[Run]:
        """A chunk's blocks, divided where padding begins or ends, and where the layers of a group
        keep other fields than those of the group before."""
        layout = self._layout
        size, divisions = layout.stored_block_bytes // layout.kv_shards, layout.divisions
        kinds = [
            (block == PADDING, divisions[place // layout.chunk_blocks])
            for place, block in enumerate(blocks)
        ]
        runs, begin = [], 0
        for (_, group), members in groupby(kinds):
            end = begin + len(list(members))
            runs.append(Run(blocks[begin:end], slice(begin * size, end * size), group))
            begin = end
        return runs

    def _runs(self) -> list[str | None]:
        """Return the run id of each data server: "" if not known yet, None if it is down."""
        plane = self._plane
        return [
            None if trouble else run_id
            for run_id, trouble in zip(plane.run_ids, plane.troubles, strict=True)
        ]

    def _emit(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        if not self._closed:
            os.eventfd_write(self._wake, 1)
