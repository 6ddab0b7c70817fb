"""The index side of the connector: all that its control thread does.

In: from any thread, lookups, markers to write, to prolong and to drop, announcements. Out:
ConnectorEvents through `emit`: LookedUp and Published, each exactly once, and the entries of this
node's inbox.

What is one after another in a hand-off stays so: a chunk's marker is written once all of its bytes
are acknowledged, then who waits for it is told (without the step loop, whose next step may take
longer than the transfer), and then comes Published, after all of which there is the hand-off's end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton_kvstore.errors import ServerRefused, StoreError
from baton_kvstore.index.markers import Index
from baton_kvstore.keys import ttl_ms
from baton_node.settings import StoreCare
from baton_node.store.base import ChunkRef, ConnectorEvent, LookedUp, Published
from baton_node.store.control_thread import ControlThread, WriteBatcher
from baton_node.store.index_check import IndexCheck
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.store import InboxEntry, Marker

logger = logging.getLogger(__name__)

INBOX_BLOCK_MS = 1000
RETRY_S = 0.5  # pause after the inbox could not be read
MAX_PENDING_ENTRIES = 10_000  # announcements waiting for a slow index; more are dropped
MAX_PENDING_MARKERS = 10_000
CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store is, as whom this node talks to it, and what it may do there."""

    index_url: str = field(repr=False)  # URLs may hold a password
    data_urls: tuple[str, ...] = field(repr=False)
    pool: str
    node: NodeId
    epoch: Epoch
    fingerprint: Fingerprint
    settings: StoreCare = "apply"
    write_behind_bandwidth: int | None = None  # bytes/s; None: a tenth of the measured link


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk whose bytes are all acknowledged."""

    chunk: ChunkRef
    marker: Marker
    bytes: int
    inbox: tuple[str, str] | None = None  # who waits for it


class IndexClient:
    """`runs` gives per data server its run id, "" where it is not known yet, None where it is
    away. `connect` makes an index from its URL and the pool's name. Public methods may be called
    from any thread."""

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
        begin = self._control.begin
        self._markers = WriteBatcher[None, Stored](begin, self._mark, MAX_PENDING_MARKERS)
        self._fetched = WriteBatcher[None, ChunkRef](begin, self._refresh, MAX_PENDING_MARKERS)
        self._outboxes = WriteBatcher[tuple[str, str], InboxEntry](
            begin, self._send, MAX_PENDING_ENTRIES
        )

    def start(self) -> None:
        self._control.start(self._open)

    def close(self) -> None:
        self._control.close(self._end)

    @property
    def trouble(self) -> str:
        """Why nothing is added to the index; "" while it can be."""
        return self._check.trouble

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        if self._check.away:
            self._emit(LookedUp(request, attempt, (None,) * len(hashes)))
            return
        self._control.spawn(self._look_up(request, attempt, tuple(hashes)))

    def mark(self, stored: Stored) -> None:
        """Write its marker, together with those of others that come meanwhile; Published."""
        if not self._control.call(lambda: self._gather(stored)):
            self._emit(Published(stored.chunk, None, 0, CLOSED))

    def refresh(self, chunk: ChunkRef) -> None:
        """It was fetched, so its value lives on; its marker does too, prolonged together with those
        of others that come meanwhile. One that was only found does not: it would outlive the value,
        and hide that somebody has to put it again."""
        self._control.call(lambda: self._prolong(chunk))

    def unmark(self, chunk: BlockHash, marker: Marker) -> None:
        self._control.spawn(self._unmark(chunk, marker))

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        if not self._check.trouble:
            self._control.call(lambda: self._enqueue(inbox, entry))

    # --- the control thread -----------------------------------------------------------------------

    def _open(self) -> None:
        self._index = self._connect(self._address.index_url, self._address.pool)
        self._control.begin(self._check.run())
        self._control.begin(self._read_inbox())

    async def _end(self) -> None:
        node, epoch = self._address.node, self._address.epoch
        try:
            await self._check.ask(lambda: self._idx.drop_inbox(node, epoch), adds=False)
        except StoreError as error:
            logger.debug("inbox left behind: %s", error)
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
        except Exception:  # a task's outer edge, and somebody waits for the answer
            logger.exception("lookup for %s failed", request)
        runs = self._runs()
        alive = tuple(
            marker if marker is not None and _may_exist(marker, runs) else None
            for marker in markers
        )
        self._emit(LookedUp(request, attempt, alive))

    # --- markers ----------------------------------------------------------------------------------

    def _gather(self, stored: Stored) -> None:
        if not self._markers.add(None, stored):
            reason = f"{MAX_PENDING_MARKERS} markers wait for the index already"
            self._emit(Published(stored.chunk, None, 0, reason))

    async def _mark(self, _: None, batch: list[Stored]) -> None:
        """In one round trip; who is cut short says so for all of them."""
        marks = [(each.chunk.hash, each.marker, ttl_ms(each.marker.depth)) for each in batch]
        reason = "cancelled"
        try:
            await self._check.ask(lambda: self._idx.mark_all(self._address.fingerprint, marks))
            reason = ""
            self._tell(batch)
        except StoreError as error:
            reason = str(error)
        finally:
            for each in batch:
                marker, size = (None, 0) if reason else (each.marker, each.bytes)
                self._emit(Published(each.chunk, marker, size, reason))

    def _tell(self, batch: list[Stored]) -> None:
        for each in batch:
            if each.inbox is not None:
                request, attempt, index = each.chunk.request, each.chunk.attempt, each.chunk.index
                entry = InboxEntry(request, attempt, "chunks", index, (each.marker,))
                self._enqueue(each.inbox, entry)

    def _prolong(self, chunk: ChunkRef) -> None:
        if not self._fetched.add(None, chunk):
            logger.debug("marker of chunk %s is not prolonged: too many wait", chunk.hash.hex())

    async def _refresh(self, _: None, batch: list[ChunkRef]) -> None:
        lifetimes = [(chunk.hash, ttl_ms(chunk.index)) for chunk in batch]
        try:
            await self._check.ask(
                lambda: self._idx.refresh(self._address.fingerprint, lifetimes), adds=False
            )
        except StoreError as error:
            logger.debug("%d markers were not prolonged: %s", len(batch), error)

    async def _unmark(self, chunk: BlockHash, marker: Marker) -> None:
        try:
            await self._check.ask(
                lambda: self._idx.unmark(self._address.fingerprint, chunk, marker), adds=False
            )
        except StoreError as error:
            logger.debug("marker of chunk %s stays: %s", chunk.hex(), error)

    # --- inboxes ----------------------------------------------------------------------------------

    def _enqueue(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        if not self._outboxes.add(inbox, entry):
            logger.debug("an announcement to %s is dropped: too many wait", inbox[0])

    async def _send(self, inbox: tuple[str, str], batch: list[InboxEntry]) -> None:
        node, epoch = NodeId(inbox[0]), Epoch(inbox[1])
        try:
            await self._check.ask(partial(self._idx.announce, node, epoch, batch))
        except StoreError as error:
            # The decode node computes what it does not hear of.
            logger.debug("%d announcements to %s lost: %s", len(batch), node, error)

    async def _read_inbox(self) -> None:
        run_id, broken, warned = "", True, False
        ids: list[bytes] = []  # of the entries that were emitted
        while not self._control.closing:
            await self._check.answers()
            try:
                if broken:
                    now = await self._check.ask(self._idx.run_id, adds=False)
                    if now != run_id:
                        # An index that came back may have forgotten how it was set.
                        await self._check.ask(self._tend, adds=False)
                        run_id = now
                ids, entries = await self._check.ask(partial(self._read_next, ids), adds=False)
                broken = warned = False
            except StoreError as error:
                # Of an index that is away the check has warned.
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

    def _tend(self) -> Awaitable[None]:
        return self._idx.tend(self._address.settings)

    def _read_next(self, ids: Sequence[bytes]) -> Awaitable[tuple[list[bytes], list[InboxEntry]]]:
        node, epoch = self._address.node, self._address.epoch
        return self._idx.read_inbox(node, epoch, ids, INBOX_BLOCK_MS)


def _may_exist(marker: Marker, runs: Sequence[str | None]) -> bool:
    """False for what a data server took with it when it was restarted, what is on one that is
    away, and what is not ours."""
    if not 0 <= marker.instance < len(runs):
        return False
    return runs[marker.instance] in ("", marker.run_id)
