"""The connector's index side: all work of its control thread.

In, from any thread: lookups; markers to write, refresh or drop; announcements. Out, through `emit`:
ChunksLookedUp and ChunkPublished, each exactly once, and the entries of this node's inbox.

The order of a hand-off is fixed. When all bytes of a chunk are acknowledged, its marker is written;
then its announcement is queued for the decode node's inbox; then ChunkPublished is emitted. The
step loop announces the hand-off's end after the last ChunkPublished. The step loop takes no part in
announcing a chunk, since a step may take longer than the transfer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton_kvstore.errors import ServerRefused, StoreError
from baton_kvstore.index.markers import Index
from baton_kvstore.keys import ttl_ms
from baton_node.store.address import StoreAddress
from baton_node.store.base import ChunkPublished, ChunkRef, ChunksLookedUp, ConnectorEvent
from baton_node.store.control_thread import ControlThread
from baton_node.store.index_check import IndexCheck
from baton_node.store.write_batcher import WriteBatcher
from baton_protocol.ids import BlockHash, Epoch, NodeId, RequestId
from baton_protocol.store import InboxEntry, Marker

logger = logging.getLogger(__name__)
INBOX_BLOCK_MS = 1000
RETRY_S = 0.5  # pause after a failed read of the inbox
MAX_PENDING_ENTRIES = 10_000  # announcements per inbox that wait for the index; others are dropped
MAX_PENDING_MARKERS = 10_000
CLOSED = "closed"
Lifetime = tuple[BlockHash, int]  # a chunk, and the milliseconds that its marker lives


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk whose bytes the data server has all acknowledged."""

    chunk: ChunkRef
    marker: Marker
    bytes: int
    inbox: tuple[str, str] | None = None  # (node, epoch) of the decode node that waits for it


class IndexClient:
    """Lookups, markers and inboxes on the index. Any thread may call the public methods.

    `runs` returns the run id of each data server: "" if not known yet, None if the server is down.
    `connect` makes an index client from the index URL and the pool's name.
    """

    def __init__(
        self,
        address: StoreAddress,
        emit: Callable[[ConnectorEvent], None],
        runs: Callable[[], Sequence[str | None]],
        connect: Callable[[str, str], Index] = Index,
    ) -> None:
        self._address = address
        self._connect = connect
        self._emit = emit
        self._runs = runs
        self._control = ControlThread("kv-control")
        self._index: Index | None = None
        self._check = IndexCheck(self._probe)
        begin = self._control.begin_task
        self._markers = WriteBatcher[None, Stored](begin, self._mark, MAX_PENDING_MARKERS)
        self._fetched = WriteBatcher[None, Lifetime](begin, self._refresh, MAX_PENDING_MARKERS)
        self._outboxes = WriteBatcher[tuple[str, str], InboxEntry](
            begin, self._send, MAX_PENDING_ENTRIES
        )

    def start(self) -> None:
        self._control.start(self._open)

    def close(self) -> None:
        self._control.close(self._end)

    @property
    def trouble(self) -> str:
        """Why the index accepts no writes now, "" if it does."""
        return self._check.trouble

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        if self._check.away:
            self._emit(ChunksLookedUp(request, attempt, (None,) * len(hashes)))
            return
        self._control.spawn_task(self._look_up(request, attempt, tuple(hashes)))

    def mark(self, stored: Stored) -> None:
        """Write a chunk's marker, announce the chunk and emit ChunkPublished. Markers that arrive
        during a write are batched."""
        if not self._control.call_soon(lambda: self._gather(stored)):
            self._emit(ChunkPublished(stored.chunk, None, 0, CLOSED))

    def refresh(self, chunk: ChunkRef, marker: Marker) -> None:
        """Prolong the marker of a chunk that was fetched, since the fetch prolonged its value.

        Do not do this for a marker that was only found: it would outlive its value and hide that
        the chunk must be put again.
        """
        lifetime = (chunk.hash, ttl_ms(chunk.index, kept_until=marker.kept_until))
        self._control.call_soon(lambda: self._prolong(lifetime))

    def unmark(self, chunk: BlockHash, marker: Marker) -> None:
        self._control.spawn_task(self._unmark(chunk, marker))

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        if not self._check.trouble:
            self._control.call_soon(lambda: self._enqueue(inbox, entry))

    # --- the control thread -----------------------------------------------------------------------

    def _open(self) -> None:
        self._index = self._connect(self._address.index_url, self._address.pool)
        self._control.begin_task(self._check.probe_forever())
        self._control.begin_task(self._read_inbox())

    async def _end(self) -> None:
        node, epoch = self._address.node, self._address.epoch
        try:
            await self._check.ask(lambda: self._idx.drop_inbox(node, epoch), adds=False)
        except StoreError as error:
            logger.debug("cannot delete the inbox: %s", error)
        await self._idx.close()

    async def _probe(self) -> None:
        await self._idx.probe(self._address.node, self._address.epoch)

    @property
    def _idx(self) -> Index:
        if self._index is None:
            raise RuntimeError("the control thread has not started")
        return self._index

    # --- lookups ----------------------------------------------------------------------------------

    async def _look_up(
        self, request: RequestId, attempt: int, hashes: tuple[BlockHash, ...]
    ) -> None:
        markers: list[Marker | None] = [None] * len(hashes)
        fingerprint = self._address.fingerprint
        try:
            markers = await self._check.ask(
                lambda: self._idx.lookup(fingerprint, hashes), adds=False
            )
        except StoreError as error:
            logger.debug("lookup for %s failed: %s", request, error)
        except Exception:  # a task's outer edge; the request waits for its ChunksLookedUp
            logger.exception("lookup for %s failed", request)
        runs = self._runs()
        alive = tuple(
            marker if marker is not None and _may_exist(marker, runs) else None
            for marker in markers
        )
        self._emit(ChunksLookedUp(request, attempt, alive))

    # --- markers ----------------------------------------------------------------------------------

    def _gather(self, stored: Stored) -> None:
        if not self._markers.add(None, stored):
            reason = f"the queue of markers for the index is full ({MAX_PENDING_MARKERS})"
            self._emit(ChunkPublished(stored.chunk, None, 0, reason))

    async def _mark(self, _: None, batch: list[Stored]) -> None:
        """Write a batch of markers in one round trip. Emit ChunkPublished for each, even if the
        write fails or is cancelled."""
        marks = [
            (
                stored.chunk.hash,
                stored.marker,
                ttl_ms(stored.marker.depth, kept_until=stored.marker.kept_until),
            )
            for stored in batch
        ]
        reason = "cancelled"
        try:
            await self._check.ask(lambda: self._idx.mark_all(self._address.fingerprint, marks))
            reason = ""
            self._announce(batch)
        except StoreError as error:
            reason = str(error)
        finally:
            for stored in batch:
                marker, size = (None, 0) if reason else (stored.marker, stored.bytes)
                self._emit(ChunkPublished(stored.chunk, marker, size, reason))

    def _announce(self, batch: list[Stored]) -> None:
        for stored in batch:
            if stored.inbox is not None:
                request, attempt, index = (
                    stored.chunk.request,
                    stored.chunk.attempt,
                    stored.chunk.index,
                )
                entry = InboxEntry(request, attempt, "chunks", index, (stored.marker,))
                self._enqueue(stored.inbox, entry)

    def _prolong(self, lifetime: Lifetime) -> None:
        if not self._fetched.add(None, lifetime):
            logger.debug(
                "not prolonging the marker of chunk %s: too many are queued", lifetime[0].hex()
            )

    async def _refresh(self, _: None, batch: list[Lifetime]) -> None:
        try:
            await self._check.ask(
                lambda: self._idx.refresh(self._address.fingerprint, batch), adds=False
            )
        except StoreError as error:
            logger.debug("cannot prolong %d markers: %s", len(batch), error)

    async def _unmark(self, chunk: BlockHash, marker: Marker) -> None:
        try:
            await self._check.ask(
                lambda: self._idx.unmark(self._address.fingerprint, chunk, marker), adds=False
            )
        except StoreError as error:
            logger.debug("cannot delete the marker of chunk %s: %s", chunk.hex(), error)

    # --- inboxes ----------------------------------------------------------------------------------

    def _enqueue(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        if not self._outboxes.add(inbox, entry):
            logger.debug("dropping an announcement to %s: too many are queued", inbox[0])

    async def _send(self, inbox: tuple[str, str], batch: list[InboxEntry]) -> None:
        node, epoch = NodeId(inbox[0]), Epoch(inbox[1])
        try:
            await self._check.ask(partial(self._idx.announce, node, epoch, batch))
        except StoreError as error:
            # The decode node computes chunks that are not announced to it.
            logger.debug("cannot deliver %d announcements to %s: %s", len(batch), node, error)

    async def _read_inbox(self) -> None:
        run_id, broken, warned = "", True, False
        ids: list[bytes] = []  # ids of the emitted entries, to acknowledge with the next read
        while not self._control.closing:
            await self._check.wait_for_answers()
            try:
                if broken:
                    now = await self._check.ask(self._idx.run_id, adds=False)
                    if now != run_id:
                        # A restarted index may have lost its settings.
                        await self._check.ask(self._tend, adds=False)
                        run_id = now
                ids, entries = await self._check.ask(partial(self._read_next, ids), adds=False)
                broken = warned = False
            except StoreError as error:
                # IndexCheck has already warned if the index is away.
                if isinstance(error, ServerRefused) and not warned:
                    logger.warning("cannot read the inbox: %s", error)
                    warned = True
                broken = True
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # a task's outer edge: if it ended, each hand-off would time out
                logger.exception("reading the inbox failed")
                await asyncio.sleep(RETRY_S)
                continue
            for entry in entries:
                self._emit(entry)

    def _tend(self) -> Awaitable[None]:
        return self._idx.tend(self._address.settings)

    def _read_next(self, ids: Sequence[bytes]) -> Awaitable[tuple[list[bytes], list[InboxEntry]]]:
        node, epoch = self._address.node, self._address.epoch
        return self._idx.read_inbox(node, epoch, ids, INBOX_BLOCK_MS)


def _may_exist(marker: Marker, runs: Sequence[str | None]) -> bool:
    """Return False if the marker's data server has restarted since, is down, or is not in this
    node's list."""
    if not 0 <= marker.instance < len(runs):
        return False
    return runs[marker.instance] in ("", marker.run_id)
