"""KVConnector over baton_kvstore: transfer threads beside the memory, one control thread.

    chunks      DataPlane's threads copy between KVMemory and their staging buffers
    the index   an asyncio loop of its own in the control thread: lookups, markers, inboxes
    the caller  the step loop; it never blocks here. Results wait in a deque, an eventfd wakes it

In: calls of the step loop. Out: ConnectorEvents through poll(), each call settled exactly once:
a publish gives Copied and then Published, a fetch Fetched, a lookup LookedUp, whatever fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.api import (
    ChunkRef,
    ConnectorEvent,
    Copied,
    Fetched,
    KVMemory,
    LookedUp,
    Published,
)
from baton_kvstore.data import DataPlane
from baton_kvstore.errors import StoreError
from baton_kvstore.index import INBOX_START, Index
from baton_kvstore.keys import ttl_ms
from baton_kvstore.operations import GetResult, PutResult
from baton_node.control import ControlThread
from baton_node.jobs import PADDING
from baton_protocol.ids import BlockHash, BlockId, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.store import InboxEntry, Marker

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 1.0
INBOX_BLOCK_MS = 1000
RETRY_S = 0.5  # pause after the index could not be read
CLOSE_INDEX_S = 1.0
MAX_PENDING_ENTRIES = 10_000  # announcements waiting for a slow index; more are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store is, and as whom this node talks to it."""

    index_url: str
    data_urls: tuple[str, ...]
    pool: str
    node: NodeId
    epoch: Epoch
    fingerprint: Fingerprint


class StoreConnector:
    """Make it, start() it, close() it in the step loop's thread."""

    def __init__(self, address: StoreAddress, memory: KVMemory) -> None:
        self._address = address
        self._memory = memory
        self._layout: KVLayout = memory.layout
        self._events: deque[ConnectorEvent] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._plane = DataPlane(
            address.data_urls, memory.layout, address.fingerprint, address.epoch
        )
        self._control = ControlThread("kv-control")
        self._index: Index | None = None
        self._outboxes: dict[tuple[str, str], deque[InboxEntry]] = {}
        self._closed = False
        self._deaf = False  # the index does not answer, and that was said

    @property
    def plane(self) -> DataPlane:
        return self._plane

    def start(self) -> None:
        self._plane.start()
        self._control.start(self._open_index)

    def close(self) -> None:
        """Settle what is in flight and end the threads."""
        if not self._closed:
            self._closed = True
            self._plane.close()
            self._control.close(self._close_index)
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

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        self._control.spawn(self._look_up(request, attempt, tuple(hashes)))

    def fetch(self, chunk: ChunkRef, marker: Marker, blocks: Sequence[BlockId]) -> None:
        """Leading blocks given as padding hold their KV already and are not written."""
        keep = sum(1 for block in blocks if block == PADDING)
        offset = keep * self._layout.block_bytes
        targets = tuple(blocks[keep:])

        def sink(payload: memoryview) -> None:
            self._memory.write(targets, payload[offset:])

        def done(result: GetResult) -> None:
            self._emit(Fetched(chunk, result.ok, result.bytes, result.reason))
            if result.gone:
                logger.info("chunk %s is not to be used: %s", chunk.hash.hex(), result.reason)
                self._control.spawn(self._unmark(chunk.hash, marker))

        self._plane.submit_get(chunk.hash, marker, chunk.index, sink, done)

    def publish(self, chunk: ChunkRef, blocks: Sequence[BlockId]) -> None:
        source = tuple(blocks)

        def fill(payload: memoryview) -> None:
            self._memory.read(source, payload)

        def copied() -> None:
            self._emit(Copied(chunk, source))

        def done(result: PutResult) -> None:
            if result.marker is None:
                self._emit(Published(chunk, None, 0, result.reason))
            elif not self._control.spawn(self._mark(chunk, result.marker, result.bytes)):
                self._emit(Published(chunk, None, 0, "closed"))

        tokens = self._layout.chunk_tokens
        self._plane.submit_put(chunk.hash, tokens, chunk.index, fill, copied, done)

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        self._control.call(lambda: self._enqueue(inbox, entry))

    # --- any thread ----------------------------------------------------------------------------

    def _emit(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    # --- the control thread -----------------------------------------------------------------------

    def _open_index(self) -> None:
        self._index = Index(self._address.index_url, self._address.pool)
        self._control.begin(self._read_inbox())

    async def _close_index(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_INDEX_S):
                await self._idx.drop_inbox(self._address.node, self._address.epoch)
        except (StoreError, TimeoutError) as error:
            logger.debug("inbox left behind: %s", error)
        await self._idx.close()

    @property
    def _idx(self) -> Index:
        if self._index is None:
            raise RuntimeError("the control thread has not started")
        return self._index

    async def _look_up(
        self, request: RequestId, attempt: int, hashes: tuple[BlockHash, ...]
    ) -> None:
        markers: list[Marker | None] = [None] * len(hashes)
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                markers = await self._idx.lookup(self._address.fingerprint, hashes)
        except (StoreError, TimeoutError) as error:
            self._say("lookup for %s failed: %s", request, error or "no answer in time")
        except Exception:  # a task's outer edge, and somebody waits for the answer
            logger.exception("lookup for %s failed", request)
        run_ids = self._plane.run_ids
        alive = tuple(
            marker if marker is not None and self._may_exist(marker, run_ids) else None
            for marker in markers
        )
        self._emit(LookedUp(request, attempt, alive))
        await self._refresh(hashes, alive)

    async def _refresh(
        self, hashes: tuple[BlockHash, ...], markers: tuple[Marker | None, ...]
    ) -> None:
        """Markers that were hit live on, as their chunks do when they are fetched."""
        hits = [
            (chunk, ttl_ms(marker.depth))
            for chunk, marker in zip(hashes, markers, strict=True)
            if marker is not None
        ]
        try:
            await self._idx.refresh(self._address.fingerprint, hits)
        except StoreError as error:
            logger.debug("markers were not refreshed: %s", error)

    @staticmethod
    def _may_exist(marker: Marker, run_ids: tuple[str, ...]) -> bool:
        """False for what a data server took with it when it was restarted, or that is not ours."""
        if not 0 <= marker.instance < len(run_ids):
            return False
        return run_ids[marker.instance] in ("", marker.run_id)

    async def _mark(self, chunk: ChunkRef, marker: Marker, size: int) -> None:
        reason = "cancelled"
        try:
            lifetime = ttl_ms(marker.depth)
            await self._idx.mark(self._address.fingerprint, chunk.hash, marker, lifetime)
            reason = ""
        except StoreError as error:
            reason = str(error)
        finally:
            ok = not reason
            self._emit(Published(chunk, marker if ok else None, size if ok else 0, reason))

    async def _unmark(self, chunk: BlockHash, marker: Marker) -> None:
        try:
            await self._idx.unmark(self._address.fingerprint, chunk, marker)
        except StoreError as error:
            self._say("marker of chunk %s stays: %s", chunk.hex(), error)

    def _say(self, message: str, *values: object) -> None:
        """Warn of what the index did not do, unless it is known to be away: it is read all the
        time, and its loss is said once."""
        logger.log(logging.DEBUG if self._deaf else logging.WARNING, message, *values)

    def _enqueue(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        """Entries of one inbox go out one batch at a time, so that their order is kept."""
        waiting = self._outboxes.get(inbox)
        if waiting is None:
            self._outboxes[inbox] = deque([entry])
            self._control.begin(self._drain(inbox))
        elif len(waiting) < MAX_PENDING_ENTRIES:
            waiting.append(entry)

    async def _drain(self, inbox: tuple[str, str]) -> None:
        waiting = self._outboxes[inbox]
        node, epoch = NodeId(inbox[0]), Epoch(inbox[1])
        try:
            while waiting:
                batch = list(waiting)
                waiting.clear()
                try:
                    await self._idx.announce(node, epoch, batch)
                except StoreError as error:
                    # The decode node computes what it does not hear of.
                    self._say("%d announcements to %s lost: %s", len(batch), node, error)
        finally:
            del self._outboxes[inbox]

    async def _read_inbox(self) -> None:
        node, epoch, last = self._address.node, self._address.epoch, INBOX_START
        while not self._control.closing:
            try:
                last, entries = await self._idx.read_inbox(node, epoch, last, INBOX_BLOCK_MS)
                if self._deaf:
                    logger.warning("the inbox can be read again")
                self._deaf = False
            except StoreError as error:
                if not self._deaf:
                    logger.warning("the inbox cannot be read: %s", error)
                self._deaf = True
                # An index that came back empty starts its streams anew.
                last = INBOX_START
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # a task's outer edge: without it each hand-off would time out
                logger.exception("the inbox cannot be read")
                await asyncio.sleep(RETRY_S)
                continue
            for entry in entries:
                self._emit(entry)
