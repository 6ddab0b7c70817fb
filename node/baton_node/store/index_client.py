"""The connector's index side: all work of its control thread.

In, from any thread: lookups; markers to write, refresh or drop; announcements. Out, through `emit`:
LookedUp and Published, each exactly once, and the entries of this node's inbox.

The order of a hand-off is fixed. When all bytes of a chunk are acknowledged, its marker is written;
then its announcement is queued for the decode node's inbox; then Published is emitted. The step
loop announces the hand-off's end after the last Published. The step loop takes no part in
announcing a chunk, since a step may take longer than the transfer.

ControlThread  runs coroutines from any thread in its own asyncio loop; each delivers its own
               result. The step loop and the transfer threads never wait for it
WriteBatcher   batches small writes: items that arrive during a write go into the next one, so an
               idle server gets an item at once and a slow server gets few, large writes
IndexCheck     watches whether the index can be used
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from baton_kvstore.errors import ServerRefused, StoreError, StoreUnavailable
from baton_kvstore.index.markers import Index
from baton_kvstore.keys import ttl_ms
from baton_node.store.base import ChunkRef, ConnectorEvent, LookedUp, Published
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.policies import StoreCare
from baton_protocol.store import InboxEntry, Marker

CLOSE_S = 4.0
CANCEL_S = 0.2

Work = Coroutine[Any, Any, None]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class ControlThread:
    """A thread with an asyncio loop. Call start() and close() in one thread, call() and spawn() in
    any."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepare: Callable[[], None] | None = None
        self._closing = False

    @property
    def closing(self) -> bool:
        return self._closing

    def start(self, prepare: Callable[[], None]) -> None:
        """Start the thread, which calls `prepare` first."""
        self._prepare = prepare
        self._thread.start()

    def call(self, act: Callable[[], None]) -> bool:
        """Run `act` in the thread. Return False if the thread has ended."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def spawn(self, work: Work) -> bool:
        """Run `work` as a task of the thread. Return False, and drop it, if the thread is
        closing."""
        if self._closing or not self.call(lambda: self.begin(work)):
            work.close()
            return False
        return True

    def begin(self, work: Work) -> None:
        """spawn() for callers inside the thread."""
        if self._closing:
            work.close()
            return
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self, last: Callable[[], Work]) -> None:
        """Cancel all tasks, run `last()` and end the thread. Wait at most CLOSE_S."""
        self._closing = True
        if self._thread.is_alive():
            self.call(lambda: self._end(last))
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._prepare is not None:
            self._prepare()
        self._loop.run_forever()

    def _end(self, last: Callable[[], Work]) -> None:
        ending = self._loop.create_task(self._finish(last))
        ending.add_done_callback(lambda _: self._loop.stop())

    async def _finish(self, last: Callable[[], Work]) -> None:
        until = self._loop.time() + CLOSE_S / 2
        while self._tasks and self._loop.time() < until:
            for task in self._tasks:
                task.cancel()
            # Cancel again if a task swallowed it: wait_for() does so if it completes meanwhile.
            await asyncio.wait(self._tasks, timeout=CANCEL_S)
        await last()


class WriteBatcher(Generic[K, T]):
    """Collects items per key while the key's previous write is in progress.

    `begin` starts a task. `write` gets a key and all items that have collected for it, in order;
    calls for one key do not overlap. It must handle its own errors. At most `most` items wait per
    key. Belongs to one event loop.
    """

    def __init__(
        self,
        begin: Callable[[Work], None],
        write: Callable[[K, list[T]], Awaitable[None]],
        most: int,
    ) -> None:
        self._begin = begin
        self._write = write
        self._most = most
        self._waiting: dict[K, list[T]] = {}

    def add(self, key: K, item: T) -> bool:
        """Add an item. Return False, and drop it, if `most` items wait for the key already."""
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = [item]
            self._begin(self._drain(key))
        elif len(waiting) >= self._most:
            return False
        else:
            waiting.append(item)
        return True

    async def _drain(self, key: K) -> None:
        waiting = self._waiting[key]
        try:
            while waiting:
                batch = list(waiting)
                waiting.clear()
                await self._write(key, batch)
        finally:
            del self._waiting[key]


logger = logging.getLogger(__name__)

EVERY_S = 1.0  # interval of probes
QUICK_CHECK_S = 0.25  # interval of probes while there is trouble


class IndexCheck:
    """Watches whether the store's index can be used: whether it answers and accepts writes.

    In: this node's commands to the index, and a probe (a small write). The probe runs each second,
    more often while there is trouble, and at once after a failed command. Out: the commands'
    results, or StoreUnavailable; `trouble` and `away`.

    While the index does not answer, all commands are refused at once, so a frozen index costs one
    deadline, not one per command. While it is full, only commands that need room are refused. One
    log line reports the failure, and one the recovery.

    Any thread may read the properties; all else belongs to one event loop.
    """

    def __init__(
        self, probe: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._clock = clock
        self._trouble = ""
        self._succeeded_at = float("-inf")
        self._now = asyncio.Event()  # set: run the next probe now
        self._answers = asyncio.Event()
        self._answers.set()

    @property
    def trouble(self) -> str:
        """Why the index accepts no writes now, "" if it does."""
        return self._trouble

    @property
    def away(self) -> bool:
        """True while the index does not answer at all."""
        return not self._answers.is_set()

    async def answers(self) -> None:
        """Wait until the index answers again, if it is away."""
        await self._answers.wait()

    async def ask(self, question: Callable[[], Awaitable[T]], *, adds: bool = True) -> T:
        """Run a command and return its result. `adds` says that it needs room on the index. Raise
        StoreUnavailable if the command fails, or at once if the index is away, or in trouble and
        `adds` is set."""
        if self.away or (adds and self._trouble):
            raise StoreUnavailable(self._trouble)
        began = self._clock()
        try:
            return await question()
        except ServerRefused:
            self._now.set()  # the index may be full; probe to find out
            raise
        except StoreUnavailable as error:
            self._lost(error, began)
            raise

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            self._now.clear()
            began = self._clock()
            try:
                await self._probe()
            except StoreUnavailable as error:
                self._lost(error, began)
            except Exception as error:  # a task's outer edge: without it, `trouble` never changes
                logger.exception("the probe of the store's index failed")
                self._lost(StoreUnavailable(repr(error)), began)
            else:
                self._found()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUICK_CHECK_S if self._trouble else EVERY_S):
                    await self._now.wait()

    def _lost(self, error: StoreUnavailable, began: float) -> None:
        """A command or probe that began at `began` has failed. Ignore it if a probe has succeeded
        since then."""
        if began < self._succeeded_at:
            return
        if isinstance(error, ServerRefused):
            self._answers.set()
        else:
            self._answers.clear()
        if not self._trouble:
            self._now.set()
            logger.warning("the store's index cannot be used: %s", error)
        self._trouble = str(error)

    def _found(self) -> None:
        self._succeeded_at = self._clock()
        self._answers.set()
        if self._trouble:
            self._trouble = ""
            logger.warning("the store's index can be used again")


INBOX_BLOCK_MS = 1000
RETRY_S = 0.5  # pause after a failed read of the inbox
MAX_PENDING_ENTRIES = 10_000  # announcements per inbox that wait for the index; others are dropped
MAX_PENDING_MARKERS = 10_000
CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The store's URLs, this node's identity there, and how the node uses it."""

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
        """Why the index accepts no writes now, "" if it does."""
        return self._check.trouble

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        if self._check.away:
            self._emit(LookedUp(request, attempt, (None,) * len(hashes)))
            return
        self._control.spawn(self._look_up(request, attempt, tuple(hashes)))

    def mark(self, stored: Stored) -> None:
        """Write a chunk's marker, announce the chunk and emit Published. Markers that arrive during
        a write are batched."""
        if not self._control.call(lambda: self._gather(stored)):
            self._emit(Published(stored.chunk, None, 0, CLOSED))

    def refresh(self, chunk: ChunkRef) -> None:
        """Prolong the marker of a chunk that was fetched, since the fetch prolonged its value.

        Do not do this for a marker that was only found: it would outlive its value and hide that
        the chunk must be put again.
        """
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
        except Exception:  # a task's outer edge; the request waits for its LookedUp
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
            reason = f"the queue of markers for the index is full ({MAX_PENDING_MARKERS})"
            self._emit(Published(stored.chunk, None, 0, reason))

    async def _mark(self, _: None, batch: list[Stored]) -> None:
        """Write a batch of markers in one round trip. Emit Published for each, even if the write
        fails or is cancelled."""
        marks = [
            (stored.chunk.hash, stored.marker, ttl_ms(stored.marker.depth)) for stored in batch
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
                self._emit(Published(stored.chunk, marker, size, reason))

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

    def _prolong(self, chunk: ChunkRef) -> None:
        if not self._fetched.add(None, chunk):
            logger.debug(
                "not prolonging the marker of chunk %s: too many are queued", chunk.hash.hex()
            )

    async def _refresh(self, _: None, batch: list[ChunkRef]) -> None:
        lifetimes = [(chunk.hash, ttl_ms(chunk.index)) for chunk in batch]
        try:
            await self._check.ask(
                lambda: self._idx.refresh(self._address.fingerprint, lifetimes), adds=False
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
            await self._check.answers()
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
