"""One put or get of a chunk in a transfer thread, and what transfers share.

A transfer thread runs these phases for one head shard after the other:

    stage     a put copies the shard into the staging buffer and writes its header; after the last
              shard the source is free
    exchange  the round trip; may be repeated on a new connection
    deliver   a get passes the verified shard to the sink

    settle    once per operation, whatever happened before: gives the caller the `PutResult` or
              `GetResult`. All shards were moved, or one failed and the rest were not tried.

The callbacks are the caller's and run in the transfer thread.

A direct operation copies nothing: the payload is sent from, or received into, the caller's memory.
The staging buffer then holds only the header, and the blocks for which the caller gave no memory.
The source of a direct put is free when the put has settled. Bytes that a direct get wrote are valid
only if the result is ok.

RateMeter and Average measure transfers; StagingPool bounds the bytes in flight; Tuning holds the
sizes and times of the data plane; PriorityQueues holds the operations that wait for a server.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

from baton_kvstore.connection.resp import RespConnection, leading
from baton_kvstore.data.chunk_format import (
    HEADER_BYTES,
    ChunkSpec,
    chunk_spec,
    epoch_digest,
    fingerprint_digest,
)
from baton_kvstore.data.chunk_format import seal as seal_value
from baton_kvstore.data.chunk_format import verify as verify_value
from baton_kvstore.errors import ServerRefused, ValueTooLong
from baton_kvstore.keys import DEFAULT_TTL_S, chunk_key, ttl_ms
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.policies import StoreCare
from baton_protocol.store import Marker, Priority

WINDOW_S = 0.1  # a busy period adds a sample to the average at least this often
WEIGHT = 0.25  # weight of the newest sample in the moving average


class Average:
    """An exponential moving average; 0.0 until the first sample. Of two samples that threads add at
    once, one may be lost."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, sample: float) -> None:
        old = self.value or sample
        self.value = old + WEIGHT * (sample - old)


class RateMeter:
    """Measures bytes per second while at least one transfer runs.

    Idle time does not count and the bytes of parallel transfers add up, so the rate is what the
    link gives a busy node. Call begin() and end() around each transfer, from any thread. `total`
    counts the same transfers, too.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, total: RateMeter | None = None
    ) -> None:
        self._clock = clock
        self._total = total
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._bytes = 0
        self._rate = Average()

    def begin(self) -> None:
        if self._total is not None:
            self._total.begin()
        with self._lock:
            if self._active == 0:
                self._since, self._bytes = self._clock(), 0
            self._active += 1

    def end(self, count: int) -> None:
        """A transfer of `count` bytes has ended; 0 if it failed."""
        if self._total is not None:
            self._total.end(count)
        with self._lock:
            self._active -= 1
            self._bytes += count
            now = self._clock()
            if self._bytes and (self._active == 0 or now - self._since >= WINDOW_S):
                self._rate.add(self._bytes / max(1e-6, now - self._since))
                self._since, self._bytes = now, 0

    @property
    def bytes_per_s(self) -> float:
        """0.0 until something was measured."""
        return self._rate.value


class StagingPool:
    """A pool of staging buffers, which bounds the bytes in flight.

    It has up to `limit` buffers of `size` bytes, allocated on demand. A transfer thread borrows one
    for an operation and gives it back, so a slow store makes transfers wait instead of memory grow.
    The buffer returned last is lent first: its pages are warm (in a VM the first access to a page
    costs microseconds).
    """

    def __init__(self, size: int, limit: int) -> None:
        self._size = size
        self._free: list[memoryview] = []
        self._unmade = limit
        self._closed = False
        self._changed = threading.Condition()

    def borrow(self) -> memoryview | None:
        """Wait for a buffer; None once the pool is closed."""
        with self._changed:
            while not self._closed:
                if self._free:
                    return self._free.pop()
                if self._unmade:
                    self._unmade -= 1
                    return memoryview(bytearray(self._size))
                self._changed.wait()
        return None

    def give_back(self, buffer: memoryview) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


PROBE_CHUNKS = 4  # chunks that a probe for room puts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes, times and rates of the data plane."""

    threads_per_instance: int = 2
    max_inflight_bytes: int = 64 << 20  # total size of staging buffers
    ttl_base_s: float = DEFAULT_TTL_S  # lifetime of a chunk at the head of its chain
    connect_timeout_s: float = 1.0
    deadline_base_s: float = 2.0  # see deadline_s()
    floor_bytes_per_s: float = 8 << 20  # the slowest acceptable rate, see deadline_s()
    queue_limit_s: float = 30.0  # an operation that waited longer is refused
    backoff_first_s: float = 0.1  # first and longest pause between probes of a server
    backoff_limit_s: float = 0.5
    idle_check_s: float = 0.5  # interval between checks of an idle server

    def deadline_s(self, size: int) -> float:
        """Seconds that a transfer of `size` bytes may take: base + size / floor rate (2.125 s for 1
        MiB)."""
        return self.deadline_base_s + size / self.floor_bytes_per_s

    def settled_s(self, size: int) -> float:
        """Seconds within which an operation of `size` bytes settles: the longest wait in the queue,
        the probe that its thread may then be running, and its own transfer."""
        return self.queue_limit_s + self.deadline_s(PROBE_CHUNKS * size) + self.deadline_s(size)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the instances of one data plane share. `settings` None leaves the servers' settings
    alone."""

    staging: StagingPool
    fingerprint: Fingerprint
    value_bytes: int  # header and payload of one head shard, with the blocks of all groups
    shards: int  # values per chunk
    puts: RateMeter
    gets: RateMeter
    tuning: Tuning
    settings: StoreCare | None


STORE_FULL = "store full"
STAMP_BYTES = 4
MISSING = "missing"
# The memory of a chunk's payload, in order. None marks a block that a get must not write.
Pieces = Sequence[memoryview | None]


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of a put. If the chunk is stored, `marker` is to be written on the index; else
    `reason` says why not. `bytes` is the payload's size if stored, `seconds` the transfer time."""

    hash: BlockHash
    marker: Marker | None
    bytes: int = 0
    reason: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.marker is not None


@dataclass(frozen=True, slots=True)
class GetResult:
    """The result of a get. If it failed, `reason` says why. `gone` True means that the chunk is
    missing or corrupt, so its marker should be dropped; False that the server was down or slow.
    `bytes` is the payload's size if ok, `seconds` the transfer time."""

    hash: BlockHash
    ok: bool
    bytes: int = 0
    reason: str = ""
    gone: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Format:
    """What all values of one data plane have in common."""

    layout: KVLayout
    fingerprint: Fingerprint
    epoch: Epoch
    ttl_base_s: float

    @cached_property
    def payload_sizes(self) -> frozenset[int]:
        """The bytes that a chunk may have: with the blocks of all groups, or only with those of the
        groups without a window."""
        sizes = frozenset({self.layout.chunk_bytes, self.layout.full_groups_bytes})
        return sizes - {0}

    def value_bytes(self, payload_bytes: int) -> int:
        """Bytes of one value of a chunk with `payload_bytes`: the header and one head shard."""
        return HEADER_BYTES + payload_bytes // self.layout.kv_shards

    def spec(
        self, chunk: BlockHash, payload_bytes: int, shard: int, tokens: int | None = None
    ) -> ChunkSpec:
        """Return the spec of one shard of a chunk with `payload_bytes`."""
        size = payload_bytes // self.layout.kv_shards
        return chunk_spec(self.layout, self.digest, chunk, tokens, shard, size)

    @cached_property
    def digest(self) -> bytes:
        return fingerprint_digest(self.fingerprint)

    @cached_property
    def writer(self) -> bytes:
        return epoch_digest(self.epoch)


def refusal(error: ServerRefused) -> str:
    """Return the reason of a put or get that the server refused."""
    return STORE_FULL if error.code == "OOM" else f"refused: {error}"


def in_pieces(direct: Pieces | None, buffer: memoryview) -> list[memoryview]:
    """Return the pieces of a value. The header is in `buffer`. The payload is in `direct`, and in
    `buffer` for blocks that are None there or if `direct` is None."""
    if direct is None:
        return [buffer]
    value, at = [buffer[:HEADER_BYTES]], HEADER_BYTES
    share = (len(buffer) - HEADER_BYTES) // len(direct)
    for piece in direct:
        value.append(buffer[at : at + share] if piece is None else piece)
        at += share
    return value


class Operation(Protocol):
    """A put or get, run by a transfer thread: stage, exchange and deliver for each shard, then
    settle. `buffer` has `value_bytes` bytes."""

    is_put: ClassVar[bool]
    priority: Priority
    queued_at: float

    @property
    def value_bytes(self) -> int:
        """Bytes of each value: the header and one head shard."""
        ...

    def stage(self, buffer: memoryview, shard: int) -> None: ...

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        """Return "", or why it failed for good. Raise StoreUnavailable if the connection failed."""
        ...

    def deliver(self, buffer: memoryview, shard: int) -> None: ...

    def settle(self, reason: str, seconds: float) -> None: ...


@dataclass(slots=True)
class Put:
    """Store one chunk of `payload_bytes`; None means all groups. `copied` is called exactly once,
    before `done`, also if the put failed or never ran: after it the source is no longer read."""

    format: Format
    hash: BlockHash
    tokens: int
    depth: int
    fill: Callable[[memoryview, int], None]
    copied: Callable[[], None]
    done: Callable[[PutResult], None]
    priority: Priority
    direct: Sequence[memoryview] | None = None
    payload_bytes: int | None = None
    is_put: ClassVar[bool] = True
    queued_at: float = 0.0
    _copied: bool = False
    _instance: int = 0
    _runs: set[str] = field(default_factory=set)  # run ids of the server while shards were put

    @property
    def value_bytes(self) -> int:
        return self.format.value_bytes(self._size)

    @property
    def _size(self) -> int:
        return self.payload_bytes or self.format.layout.chunk_bytes

    def stage(self, buffer: memoryview, shard: int) -> None:
        layout = self.format.layout
        if self.direct is None:
            self.fill(buffer[HEADER_BYTES:], shard)
        spec = self.format.spec(self.hash, self._size, shard, self.tokens)
        seal_value(in_pieces(self.direct, buffer), spec, self.format.writer)
        if self.direct is None and shard == layout.kv_shards - 1:
            self._release()

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        value = in_pieces(self.direct, buffer)
        lifetime = ttl_ms(self.depth, self.format.ttl_base_s)
        key = chunk_key(self.format.fingerprint, self.hash, shard)
        try:
            link.put(deadline, key, value, lifetime)
        except ServerRefused as error:
            return refusal(error)
        self._instance = instance
        self._runs.add(link.run_id)
        if len(self._runs) > 1:
            return f"instance {instance} was restarted between two shards"
        return ""

    def deliver(self, buffer: memoryview, shard: int) -> None:
        pass

    def settle(self, reason: str, seconds: float) -> None:
        self._release()
        marker = None if reason else self._marker()
        size = marker.payload_bytes if marker is not None else 0
        self.done(PutResult(self.hash, marker, size, reason, seconds))

    def _marker(self) -> Marker:
        layout = self.format.layout
        (run_id,) = self._runs
        return Marker(
            instance=self._instance,
            run_id=run_id,
            payload_bytes=self._size,
            shards=layout.kv_shards,
            depth=self.depth,
            stamp=int.from_bytes(os.urandom(STAMP_BYTES)),
        )

    def _release(self) -> None:
        if not self._copied:
            self._copied = True
            self.copied()


@dataclass(slots=True)
class Get:
    """Fetch one chunk from the server that its marker names."""

    format: Format
    hash: BlockHash
    marker: Marker
    depth: int
    sink: Callable[[memoryview, int], None]
    done: Callable[[GetResult], None]
    priority: Priority
    direct: Pieces | None = None
    is_put: ClassVar[bool] = False
    queued_at: float = 0.0
    _gone: bool = False

    @property
    def value_bytes(self) -> int:
        return self.format.value_bytes(self.marker.payload_bytes)

    def stage(self, buffer: memoryview, shard: int) -> None:
        pass

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        if self.marker.run_id != link.run_id:
            # This connection may be older than the server's restart. A dead one raises here, and
            # the get is repeated on a new one. A refusal of PING is an answer, too.
            with contextlib.suppress(ServerRefused):
                link.command(deadline, b"PING")
            return self.lost(f"{MISSING}: instance {instance} restarted since")
        lifetime = ttl_ms(self.depth, self.format.ttl_base_s)
        key = chunk_key(self.format.fingerprint, self.hash, shard)
        value = in_pieces(self.direct, buffer)
        try:
            length = link.get(deadline, key, value, lifetime)
        except ValueTooLong as error:
            return self.lost(str(error))
        except ServerRefused as error:
            return refusal(error)
        if length is None:
            return self.lost(MISSING)
        spec = self.format.spec(self.hash, self.marker.payload_bytes, shard)
        wrong = verify_value(leading(value, length), spec)
        return self.lost(wrong) if wrong else ""

    def lost(self, reason: str) -> str:
        """Record that the marker is wrong, and return `reason`."""
        self._gone = True
        return reason

    def deliver(self, buffer: memoryview, shard: int) -> None:
        if self.direct is None:
            self.sink(buffer[HEADER_BYTES:], shard)

    def settle(self, reason: str, seconds: float) -> None:
        size = 0 if reason else self.marker.payload_bytes
        self.done(GetResult(self.hash, not reason, size, reason, self._gone, seconds))


class PriorityQueues:
    """The operations that wait for one data server: a FIFO lane per priority.

    Hand-offs go before prefixes, and prefixes before write-behind. A write-behind operation starts
    only if another transfer thread stays free, so that more urgent operations never wait for it.
    With a single thread it starts if no other operation waits. An operation that has waited longer
    than `limit_s` goes first, since it is only refused; so no lane starves longer than that.

    `threads` transfer threads take operations. Thread-safe.
    """

    def __init__(
        self, threads: int, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lanes: dict[Priority, deque[Operation]] = {priority: deque() for priority in Priority}
        # Most busy threads when write-behind starts: one thread takes it, and one stays free.
        self._most_busy = max(0, threads - 2)
        self._limit_s = limit_s
        self._clock = clock
        self._changed = threading.Condition()
        self._busy = 0
        self._waiting_puts = 0
        self.changes = 0
        self.closed = False

    @property
    def queued(self) -> int:
        """Number of operations pushed and not yet taken."""
        return sum(len(lane) for lane in self._lanes.values())

    @property
    def puts_wait(self) -> bool:
        """Whether puts other than write-behind are queued."""
        return self._waiting_puts > 0

    def waited_s(self, operation: Operation) -> float:
        return self._clock() - operation.queued_at

    def push(self, operation: Operation) -> bool:
        """Append an operation to its lane. Return False if the queues are closed."""
        operation.queued_at = self._clock()
        with self._changed:
            if self.closed:
                return False
            self._lanes[operation.priority].append(operation)
            self._count(operation, 1)
            self._changed.notify()
            return True

    def take(self, seen: int, pause_s: float | None) -> Operation | None:
        """Wait for the next operation and return it; call give_back() when it is done.

        Return None after `pause_s` seconds (None: no limit), when the queues are closed and empty,
        or as soon as `changes` differs from `seen`, so that the caller can check for new work.
        """
        with self._changed:
            operation = self._next()
            if operation is None and self.changes == seen and not self.closed:
                self._changed.wait(pause_s)
                operation = self._next()
            if operation is not None:
                self._busy += 1
            return operation

    def give_back(self) -> None:
        """The operation that a thread took is done."""
        with self._changed:
            self._busy -= 1
            if self._lanes[Priority.BEHIND]:
                self._changed.notify()

    def wake(self) -> None:
        """Increment `changes` and wake all waiting threads."""
        with self._changed:
            self.changes += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more operations. Queued ones can still be taken."""
        self.closed = True
        self.wake()

    def _next(self) -> Operation | None:
        for lane in self._lanes.values():
            if lane and self.waited_s(lane[0]) > self._limit_s:
                return self._pop(lane)
        for priority, lane in self._lanes.items():
            behind = priority is Priority.BEHIND and not self.closed
            if lane and not (behind and self._busy > self._most_busy):
                return self._pop(lane)
        return None

    def _pop(self, lane: deque[Operation]) -> Operation:
        operation = lane.popleft()
        self._count(operation, -1)
        return operation

    def _count(self, operation: Operation, step: int) -> None:
        if operation.is_put and operation.priority is not Priority.BEHIND:
            self._waiting_puts += step
