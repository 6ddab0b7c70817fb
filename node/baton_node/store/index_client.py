"""The index side of the connector: all that its control thread does.

In: from any thread, lookups, markers to write, to prolong and to drop, announcements. Out:
ConnectorEvents through `emit`: LookedUp and Published, each exactly once, and the entries of this
node's inbox.

What is one after another in a hand-off stays so: a chunk's marker is written once all of its bytes
are acknowledged, then who waits for it is told (without the step loop, whose next step may take
longer than the transfer), and then comes Published, after all of which there is the hand-off's end.

ControlThread  runs coroutines that any thread gives it, in an asyncio loop of its own; each
               delivers its own result. The step loop and the transfer threads never wait for it
WriteBatcher   inside it, small writes that go together: what comes while one is under way is in the
               next, so that a slow server is asked seldom and an idle one at once
IndexCheck     whether the index can be used now
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
from baton_node.settings import StoreCare
from baton_node.store.base import ChunkRef, ConnectorEvent, LookedUp, Published
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.store import InboxEntry, Marker

CLOSE_S = 4.0
CANCEL_S = 0.2

Work = Coroutine[Any, Any, None]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class ControlThread:
    """start() and close() it in one thread; call() and spawn() from any."""

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
        """`prepare` runs first, inside the thread."""
        self._prepare = prepare
        self._thread.start()

    def call(self, act: Callable[[], None]) -> bool:
        """Run `act` in the thread; False when that has ended."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def spawn(self, work: Work) -> bool:
        """Run `work` as a task of the thread; False, and it never runs, if that is closing."""
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
        """Cancel all tasks, run `last()` and end the thread."""
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
            # Again where it was swallowed: wait_for() does so when both come at once.
            await asyncio.wait(self._tasks, timeout=CANCEL_S)
        await last()


class WriteBatcher(Generic[K, T]):
    """`begin` starts a task. `write` gets all that has gathered for a key, one call per key at a
    time and in order, and handles its own errors. At most `most` items wait per key."""

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
        """False where too many wait already."""
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

EVERY_S = 1.0
QUICK_CHECK_S = 0.25


class IndexCheck:
    """Whether the store's index can be used now: it answers, and it takes writes.

    In: the commands this node has for it, and a probe (a small write): each second, oftener while
    there is trouble, at once when a command failed. Out: answers, or StoreUnavailable; `trouble`
    and `away`, which any thread may read. While the index is away whoever asks is refused at once,
    so that a frozen one costs its deadline once; while it is full, only who would add to it. Its
    loss is one line in the log, its return another.

    Everything but the properties belongs to one event loop.
    """

    def __init__(
        self, probe: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe = probe
        self._clock = clock
        self._trouble = ""
        self._succeeded_at = float("-inf")
        self._now = asyncio.Event()  # probe without waiting
        self._answers = asyncio.Event()
        self._answers.set()

    @property
    def trouble(self) -> str:
        """Why nothing is added to the index; "" while it can be."""
        return self._trouble

    @property
    def away(self) -> bool:
        """True while the index does not answer at all."""
        return not self._answers.is_set()

    async def answers(self) -> None:
        """Wait until the index is not away."""
        await self._answers.wait()

    async def ask(self, question: Callable[[], Awaitable[T]], *, adds: bool = True) -> T:
        """The answer, or StoreUnavailable. `adds`: it needs room on the index."""
        if self.away or (adds and self._trouble):
            raise StoreUnavailable(self._trouble)
        began = self._clock()
        try:
            return await question()
        except ServerRefused:
            self._now.set()  # full, perhaps: the probe will say
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
            except Exception as error:  # a task's outer edge, and nothing works without it
                logger.exception("the probe of the store's index failed")
                self._lost(StoreUnavailable(repr(error)), began)
            else:
                self._found()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUICK_CHECK_S if self._trouble else EVERY_S):
                    await self._now.wait()

    def _lost(self, error: StoreUnavailable, began: float) -> None:
        """What began before the index was last seen at work says nothing about now."""
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
