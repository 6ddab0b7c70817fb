"""KVConnector over baton_kvstore: transfer threads beside the memory, one control thread.

    chunks      DataPlane's threads copy between KVMemory and their staging buffers
    the index   an asyncio loop of its own in the control thread: lookups, markers, inboxes
    the caller  the step loop; it never blocks here. Results wait in a deque, an eventfd wakes it

In: calls of the step loop. Out: ConnectorEvents through poll(), each call settled exactly once:
a publish gives Copied and then Published, a fetch Fetched, a lookup LookedUp, whatever fails.

A store in trouble costs no time: what its index or all data servers would have to do is refused at
once, and what is in flight settles at its deadline. Both are watched; see healthy().
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import partial

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
from baton_kvstore.errors import ServerRefused, StoreError
from baton_kvstore.index import INBOX_START, Index
from baton_kvstore.keys import ttl_ms
from baton_kvstore.operations import GetResult, PutResult
from baton_node.control import ControlThread
from baton_node.index_watch import IndexWatch
from baton_node.jobs import PADDING
from baton_protocol.ids import BlockHash, BlockId, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.store import InboxEntry, Marker, StoreHealth

logger = logging.getLogger(__name__)

INBOX_BLOCK_MS = 1000
RETRY_S = 0.5  # pause after the inbox could not be read
MAX_PENDING_ENTRIES = 10_000  # announcements waiting for a slow index; more are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store is, and as whom this node talks to it."""

    index_url: str = field(repr=False)  # URLs may hold a password
    data_urls: tuple[str, ...] = field(repr=False)
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
        self._watch = IndexWatch(self._probe_index)
        self._outboxes: dict[tuple[str, str], deque[InboxEntry]] = {}
        self._closed = False

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

    def healthy(self) -> bool:
        """Whether chunks can be published now: the index answers and takes writes, and a data
        server takes chunks. Any thread may ask."""
        return not self._trouble()

    def store_health(self) -> StoreHealth:
        return "up" if self.healthy() else "down"

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        if self._watch.away:
            self._emit(LookedUp(request, attempt, (None,) * len(hashes)))
            return
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
                logger.debug("chunk %s is not to be used: %s", chunk.hash.hex(), result.reason)
                self._control.spawn(self._unmark(chunk.hash, marker))

        self._plane.submit_get(chunk.hash, marker, chunk.index, sink, done)

    def publish(self, chunk: ChunkRef, blocks: Sequence[BlockId]) -> None:
        source = tuple(blocks)
        if trouble := self._trouble():
            self._emit(Copied(chunk, source))
            self._emit(Published(chunk, None, 0, trouble))
            return

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
        if not self._watch.trouble:
            self._control.call(lambda: self._enqueue(inbox, entry))

    # --- any thread ----------------------------------------------------------------------------

    def _trouble(self) -> str:
        """Why nothing can be published; "" if it can."""
        troubles = self._plane.put_troubles
        return self._watch.trouble or (troubles[0] if all(troubles) else "")

    def _emit(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    # --- the control thread -----------------------------------------------------------------------

    def _open_index(self) -> None:
        self._index = Index(self._address.index_url, self._address.pool)
        self._control.begin(self._watch.run())
        self._control.begin(self._read_inbox())

    async def _close_index(self) -> None:
        node, epoch = self._address.node, self._address.epoch
        try:
            await self._watch.ask(lambda: self._idx.drop_inbox(node, epoch), adds=False)
        except StoreError as error:
            logger.debug("inbox left behind: %s", error)
        await self._idx.close()

    async def _probe_index(self) -> None:
        await self._idx.probe(self._address.node, self._address.epoch)

    @property
    def _idx(self) -> Index:
        if self._index is None:
            raise RuntimeError("the control thread has not started")
        return self._index

    async def _look_up(
        self, request: RequestId, attempt: int, hashes: tuple[BlockHash, ...]
    ) -> None:
        markers: list[Marker | None] = [None] * len(hashes)
        fingerprint = self._address.fingerprint
        try:
            markers = await self._watch.ask(
                lambda: self._idx.lookup(fingerprint, hashes), adds=False
            )
        except StoreError as error:
            logger.debug("lookup for %s failed: %s", request, error)
        except Exception:  # a task's outer edge, and somebody waits for the answer
            logger.exception("lookup for %s failed", request)
        runs = self._runs()
        alive = tuple(
            marker if marker is not None and self._may_exist(marker, runs) else None
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
            await self._watch.ask(
                lambda: self._idx.refresh(self._address.fingerprint, hits), adds=False
            )
        except StoreError as error:
            logger.debug("markers were not refreshed: %s", error)

    def _runs(self) -> list[str | None]:
        """Per data server its run id, "" where it is not known yet, None where it is away."""
        plane = self._plane
        return [
            None if trouble else run_id
            for run_id, trouble in zip(plane.run_ids, plane.troubles, strict=True)
        ]

    @staticmethod
    def _may_exist(marker: Marker, runs: Sequence[str | None]) -> bool:
        """False for what a data server took with it when it was restarted, what is on one that is
        away, and what is not ours."""
        if not 0 <= marker.instance < len(runs):
            return False
        return runs[marker.instance] in ("", marker.run_id)

    async def _mark(self, chunk: ChunkRef, marker: Marker, size: int) -> None:
        reason = "cancelled"
        try:
            await self._watch.ask(
                lambda: self._idx.mark(
                    self._address.fingerprint, chunk.hash, marker, ttl_ms(marker.depth)
                )
            )
            reason = ""
        except StoreError as error:
            reason = str(error)
        finally:
            ok = not reason
            self._emit(Published(chunk, marker if ok else None, size if ok else 0, reason))

    async def _unmark(self, chunk: BlockHash, marker: Marker) -> None:
        try:
            await self._watch.ask(
                lambda: self._idx.unmark(self._address.fingerprint, chunk, marker), adds=False
            )
        except StoreError as error:
            logger.debug("marker of chunk %s stays: %s", chunk.hex(), error)

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
                    await self._watch.ask(partial(self._idx.announce, node, epoch, batch))
                except StoreError as error:
                    # The decode node computes what it does not hear of.
                    logger.debug("%d announcements to %s lost: %s", len(batch), node, error)
        finally:
            del self._outboxes[inbox]

    async def _read_inbox(self) -> None:
        last, run_id, broken, warned = INBOX_START, "", True, False
        while not self._control.closing:
            await self._watch.answers()
            try:
                if broken:
                    before, run_id = run_id, await self._watch.ask(self._idx.run_id, adds=False)
                    # An index that came back empty starts its streams anew.
                    last = last if run_id == before else INBOX_START
                last, entries = await self._watch.ask(partial(self._read_after, last), adds=False)
                broken = warned = False
            except StoreError as error:
                # Of an index that is away the watch has warned.
                if isinstance(error, ServerRefused) and not warned:
                    logger.warning("the inbox cannot be read: %s", error)
                    warned = True
                broken = True
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # a task's outer edge: without it each hand-off would time out
                logger.exception("the inbox cannot be read")
                await asyncio.sleep(RETRY_S)
                continue
            for entry in entries:
                self._emit(entry)

    def _read_after(self, last: str) -> Awaitable[tuple[str, list[InboxEntry]]]:
        node, epoch = self._address.node, self._address.epoch
        return self._idx.read_inbox(node, epoch, last, INBOX_BLOCK_MS)
