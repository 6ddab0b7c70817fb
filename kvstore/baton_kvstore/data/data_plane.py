"""The data plane: puts and gets of chunks, in the process that owns the cache's memory.

    plane = DataPlane(urls, layout, fingerprint, epoch)
    plane.start()
    plane.submit_put(hash, tokens, depth, fill, copied, done, priority, direct)
    plane.submit_get(hash, marker, depth, sink, done, priority, direct)
    plane.close()

submit_put and submit_get do not block: they queue an operation. Transfer threads, each with its own
blocking socket, run the operations and call back. Callbacks run in a transfer thread and must be
short. Each operation settles exactly once: `done` is always called, for a put after `copied`, and
within `Tuning.settled_s` of the chunk's size plus the time of callbacks. A put writes all head
shards of a chunk to the instance that rendezvous hashing selects among those that accept puts. A
get reads from the instance that the marker names.

Copying costs throughput. So a payload that a socket can reach is not copied: `direct` lists its
memory pieces, in order. A payload elsewhere (on a device, or split in head shards) goes through
staging buffers, with `fill` and `sink`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import xxhash

from baton_kvstore.connection.endpoint import Endpoint, parse_endpoint
from baton_kvstore.connection.resp import RespConnection
from baton_kvstore.data.server_check import ServerCheck
from baton_kvstore.data.transfers import (
    MISSING,
    Format,
    Get,
    GetResult,
    Operation,
    Pieces,
    PriorityQueues,
    Put,
    PutResult,
    RateMeter,
    Shared,
    StagingPool,
    Tuning,
)
from baton_kvstore.data.write_behind_budget import WriteBehindBudget
from baton_kvstore.errors import LinkBroken, StoreMisconfigured, StoreUnavailable
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.policies import StoreCare
from baton_protocol.store import DataInstance, Marker, Priority

logger = logging.getLogger(__name__)
CLOSED = "closed"


class Instance:
    """One data server with its queue and its transfer threads.

    Any thread may submit an operation, without blocking. Each operation settles exactly once: it
    was served, refused by an open circuit breaker, waited too long in the queue, or the instance
    was closed. Each transfer thread owns one connection and reopens it after an error. If an
    operation fails on an *old* connection, the thread repeats it once on a new one: the server may
    have restarted meanwhile, and SET and GET are idempotent.

    With two threads, one hashes and copies while the other transfers. `number` is the server's
    index in the data URLs.
    """

    def __init__(self, number: int, endpoint: Endpoint, threads: int, shared: Shared) -> None:
        self.number = number
        self.label = endpoint.label
        self._shared = shared
        tuning = shared.tuning
        self._puts, self._gets = RateMeter(total=shared.puts), RateMeter(total=shared.gets)
        self._lanes = PriorityQueues(threads, tuning.queue_limit_s)
        self._links = [RespConnection(endpoint, tuning.connect_timeout_s) for _ in range(threads)]
        self._check = ServerCheck(number, self._links, shared, self._lanes.wake)
        self._threads = [
            threading.Thread(
                target=self._work, args=(link,), name=f"kv-{number}-{lane}", daemon=True
            )
            for lane, link in enumerate(self._links)
        ]

    @property
    def run_id(self) -> str:
        """The run id seen last, "" before the first connection."""
        return self._check.run_id

    @property
    def trouble(self) -> str:
        """Why operations are refused now, "" if they are not."""
        return self._check.trouble

    @property
    def put_trouble(self) -> str:
        """Why puts are refused now, "" if they are not."""
        return self._check.put_trouble

    @property
    def queued(self) -> int:
        """Number of operations in the queue."""
        return self._lanes.queued

    @property
    def puts_wait(self) -> bool:
        """Whether puts other than write-behind are queued."""
        return self._lanes.puts_wait

    @property
    def now(self) -> DataInstance:
        """The server's figures as last measured."""
        usage = self._check.usage
        return DataInstance(
            used_bytes=usage.used_bytes,
            limit_bytes=usage.limit_bytes,
            evicted_keys=usage.evicted_keys,
            put_bytes_per_s=self._puts.bytes_per_s,
            get_bytes_per_s=self._gets.bytes_per_s,
            get_latency_ms=self._check.round_trip_s.value * 1e3,
            trouble=self.trouble,
            put_trouble=self.put_trouble,
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, operation: Operation) -> None:
        if not self._lanes.push(operation):
            self._settle(operation, CLOSED)

    def stop(self) -> None:
        """Refuse queued operations and abort running ones. Does not wait; join() does."""
        self._check.close()
        self._lanes.close()
        for link in self._links:
            link.abort()

    def join(self) -> None:
        limit = self._shared.tuning.connect_timeout_s
        limit += self._shared.tuning.deadline_s(self._shared.value_bytes)
        until = time.monotonic() + limit
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    logger.error("transfer thread %s did not end in %.1f s", thread.name, limit)
        while (operation := self._lanes.take(0, 0.0)) is not None:
            self._settle(operation, CLOSED)  # the threads were never started

    # --- in a transfer thread --------------------------------------------------------------

    def _work(self, link: RespConnection) -> None:
        self._check.reopen(link)
        while True:
            seen, idle = self._lanes.changes, not self._lanes.queued
            if not self._lanes.closed:
                check = self._check.next(link, idle)
                if check is not None:
                    check(link)
                    continue
            operation = self._lanes.take(seen, self._check.pause_s(link, idle))
            if operation is not None:
                self._serve(link, operation)
                self._lanes.give_back()
            elif self._lanes.closed:
                break
        link.close()

    def _serve(self, link: RespConnection, operation: Operation) -> None:
        """Run one operation and settle it. Catches whatever the callbacks raise."""
        reason, started = self._refusal(operation), time.monotonic()
        buffer = None if reason else self._shared.staging.borrow()
        if buffer is None:
            self._settle(operation, reason or CLOSED)
            return
        try:
            reason = self._transfer(link, operation, buffer[: operation.value_bytes])
        except Exception as error:
            logger.exception("transfer of chunk failed")
            link.close()  # its state is unknown
            reason = f"internal error: {error!r}"
        finally:
            self._shared.staging.give_back(buffer)
        self._settle(operation, reason, time.monotonic() - started)

    def _refusal(self, operation: Operation) -> str:
        if self._lanes.closed:
            return CLOSED
        if self.trouble:
            return f"data instance {self.number} is down: {self.trouble}"
        if operation.is_put and self.put_trouble:
            return f"data instance {self.number} accepts no chunks: {self.put_trouble}"
        waited = self._lanes.waited_s(operation)
        if waited > self._shared.tuning.queue_limit_s:
            return f"data instance {self.number} is too slow: waited {waited:.0f} s in its queue"
        return ""

    def _transfer(self, link: RespConnection, operation: Operation, buffer: memoryview) -> str:
        """Move each shard in turn; return "" or why it failed. All shards share one deadline, which
        counts the time of transfers only, not of callbacks."""
        size, shards = operation.value_bytes, self._shared.shards
        left = self._shared.tuning.deadline_s(size * shards)
        for shard in range(shards):
            operation.stage(buffer, shard)
            began = time.monotonic()
            reason = self._attempt(link, operation, began, began + left, buffer, shard)
            if reason:
                if operation.is_put:
                    self._check.refused(reason, began)
                return reason
            left -= time.monotonic() - began
            operation.deliver(buffer, shard)
        if operation.is_put:
            self._check.took_put()
        return ""

    def _attempt(
        self,
        link: RespConnection,
        operation: Operation,
        began: float,
        deadline: float,
        buffer: memoryview,
        shard: int,
    ) -> str:
        while not self._lanes.closed:
            fresh = not link.is_open
            try:
                if fresh:
                    self._check.open(link, deadline)
                return self._exchange(link, operation, deadline, buffer, shard)
            except StoreUnavailable as error:
                if self._lanes.closed:
                    break
                if fresh or not isinstance(error, LinkBroken):
                    self._check.lost(str(error), began)
                    return str(error)
        return CLOSED

    def _exchange(
        self,
        link: RespConnection,
        operation: Operation,
        deadline: float,
        buffer: memoryview,
        shard: int,
    ) -> str:
        meter = self._puts if operation.is_put else self._gets
        moved, began = 0, time.monotonic()
        meter.begin()
        try:
            reason = operation.exchange(link, deadline, self.number, buffer, shard)
            moved = 0 if reason else operation.value_bytes
        finally:
            meter.end(moved)
        if reason == MISSING:  # a reply without a value takes one round trip
            self._check.round_trip_s.add(time.monotonic() - began)
        return reason

    def _settle(self, operation: Operation, reason: str, seconds: float = 0.0) -> None:
        try:
            operation.settle(reason, seconds)
        except Exception:
            logger.exception("a transfer's callback failed")


def rendezvous(chunk: BlockHash, labels: Sequence[str]) -> int:
    """Return the index of the instance with the highest digest of chunk and label.

    A new instance takes over 1/(N+1) of the chunks, evenly from the N others, and no other chunk
    moves.
    """
    weights = [xxhash.xxh3_64_intdigest(chunk + label.encode()) for label in labels]
    return max(range(len(weights)), key=weights.__getitem__)


class DataPlane:
    """All data instances of one node. Create, start() and close() it in one thread; submit from
    any.

    The constructor raises StoreMisconfigured for an invalid URL or layout. A server that is down is
    not an error: its operations settle with a reason, and it is probed until it is back.

    `write_behind_bandwidth` is in bytes per second; None means a share of the measured put rate, 0
    turns write-behind off. `settings` is the mode in which a server's settings are applied or
    checked when a connection meets a new start of it; None leaves them alone.
    """

    def __init__(
        self,
        urls: Sequence[str],
        layout: KVLayout,
        fingerprint: Fingerprint,
        epoch: Epoch,
        *,
        write_behind_bandwidth: float | None = None,
        settings: StoreCare | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        if not urls:
            raise StoreMisconfigured("no data URL; give at least one")
        shards = layout.kv_shards
        if shards < 1 or layout.num_kv_heads % shards:
            raise StoreMisconfigured(
                f"kv_shards is {shards}; give a divisor of the {layout.num_kv_heads} KV heads"
            )
        tuning = tuning or Tuning()
        self._format = Format(layout, fingerprint, epoch, tuning.ttl_base_s)
        size = self._format.value_bytes(layout.chunk_bytes)
        self._staging = StagingPool(size, max(1, tuning.max_inflight_bytes // size))
        self._puts, self._gets = RateMeter(), RateMeter()
        shared = Shared(
            staging=self._staging,
            fingerprint=fingerprint,
            value_bytes=size,
            shards=shards,
            puts=self._puts,
            gets=self._gets,
            tuning=tuning,
            settings=settings,
        )
        self._instances = [
            Instance(number, parse_endpoint(url), tuning.threads_per_instance, shared)
            for number, url in enumerate(urls)
        ]
        self._labels = [instance.label for instance in self._instances]
        self._behind = WriteBehindBudget(write_behind_bandwidth)
        self.draining = False  # while True, write-behind has no limit

    def start(self) -> None:
        """Start the transfer threads, which connect at once."""
        for instance in self._instances:
            instance.start()

    def close(self) -> None:
        """Settle all pending operations with reason "closed" and join the threads."""
        for instance in self._instances:
            instance.stop()
        self._staging.close()
        for instance in self._instances:
            instance.join()

    def submit_put(
        self,
        chunk: BlockHash,
        tokens: int,
        depth: int,
        fill: Callable[[memoryview, int], None],
        copied: Callable[[], None],
        done: Callable[[PutResult], None],
        priority: Priority = Priority.PREFIX,
        direct: Sequence[memoryview] | None = None,
        payload_bytes: int | None = None,
    ) -> None:
        """Store a chunk of `tokens` tokens. `depth` is the chunk's index in its chain.

        The chunk has `payload_bytes`: `layout.chunk_bytes` (None), or `layout.full_groups_bytes`
        for only the blocks of the groups without a window. It replaces a value of another size.
        `fill(view, shard)` must write the bytes of one head shard. `copied` is called when the
        source is free. `done` gets the marker to write on the index; all shards are then
        acknowledged.

        With `direct` the payload is read from these pieces instead, again if it is sent again. They
        must not change before `copied`, which is then called when the put has settled. Raise
        ValueError if `payload_bytes` or the sizes of `direct` do not fit the layout.
        """
        size = self._format.layout.chunk_bytes if payload_bytes is None else payload_bytes
        if size not in self._format.payload_sizes:
            raise ValueError(f"payload_bytes is {size}, not in {set(self._format.payload_sizes)}")
        self._check(direct, size)
        operation = Put(
            *(self._format, chunk, tokens, depth, fill, copied, done, priority, direct, size)
        )
        self._instances[self.instance_for(chunk)].submit(operation)

    def submit_get(
        self,
        chunk: BlockHash,
        marker: Marker,
        depth: int,
        sink: Callable[[memoryview, int], None],
        done: Callable[[GetResult], None],
        priority: Priority = Priority.PREFIX,
        direct: Pieces | None = None,
    ) -> None:
        """Fetch a chunk of `marker.payload_bytes` bytes. `depth` is the chunk's index in its chain.

        `sink(view, shard)` gets the verified payload of each head shard; the view is invalid when
        it returns. After a lost shard no further shard follows, so use the data only if the result
        is ok. An impossible marker settles the operation at once, in the calling thread.

        With `direct` the payload is received into these pieces instead, before it is verified: they
        hold undefined bytes until `done`, and after it unless the result is ok. A piece of None
        skips that block of the payload; all pieces have the same size. Raise ValueError if the
        sizes of `direct` do not fit the layout.
        """
        operation = Get(self._format, chunk, marker, depth, sink, done, priority, direct)
        layout = self._format.layout
        wrong = ""
        if not 0 <= marker.instance < len(self._instances):
            wrong = f"{MISSING}: no data instance {marker.instance} among {len(self._instances)}"
        elif marker.payload_bytes not in self._format.payload_sizes or (
            marker.shards != layout.kv_shards
        ):
            wrong = (
                f"{MISSING}: the store has {marker.payload_bytes} bytes in {marker.shards} shards"
            )
        if wrong:
            operation.settle(operation.lost(wrong), 0.0)
            return
        self._check(direct, marker.payload_bytes)
        self._instances[marker.instance].submit(operation)

    def _check(self, direct: Pieces | None, payload_bytes: int) -> None:
        """Raise ValueError for wrong sizes, which would otherwise look like a corrupt value."""
        if direct is None:
            return
        shards = self._format.layout.kv_shards
        share = payload_bytes // max(1, len(direct))
        sizes = [share if piece is None else len(piece) for piece in direct]
        if shards != 1 or sum(sizes) != payload_bytes or len(set(sizes)) != 1:
            raise ValueError(
                f"direct has pieces of {sizes} bytes and kv_shards is {shards}; give pieces of "
                f"equal size, {payload_bytes} bytes in total, and only if kv_shards is 1"
            )

    def instance_for(self, chunk: BlockHash) -> int:
        """Return the instance that a chunk is put on now (see `rendezvous`). Readers use the
        instance in the chunk's marker."""
        everyone = range(len(self._instances))
        usable = [number for number in everyone if not self._instances[number].put_trouble]
        numbers = usable or everyone
        return numbers[rendezvous(chunk, [self._labels[number] for number in numbers])]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The run id of each instance as last seen, "" before the first connection."""
        return tuple(instance.run_id for instance in self._instances)

    @property
    def troubles(self) -> tuple[str, ...]:
        """For each instance why operations are refused now, "" if they are not."""
        return tuple(instance.trouble for instance in self._instances)

    @property
    def put_troubles(self) -> tuple[str, ...]:
        """For each instance why puts are refused now, "" if they are not."""
        return tuple(instance.put_trouble for instance in self._instances)

    def instances(self) -> tuple[DataInstance, ...]:
        """The servers' figures as last measured, in the order of their URLs. Does no I/O."""
        return tuple(instance.now for instance in self._instances)

    def take_behind(self, size: int) -> bool:
        """Return whether write-behind may put `size` bytes now; True counts them as written.

        Only the thread that submits write-behind puts may call this.
        """
        if self.draining:
            return True
        instances = self.instances()
        bounded = [instance for instance in instances if instance.limit_bytes]
        return self._behind.take(
            size,
            put_bytes_per_s=self.put_bytes_per_s,
            fullest=max(
                (instance.used_bytes / instance.limit_bytes for instance in bounded), default=0.0
            ),
            others=any(instance.put_trouble for instance in instances)
            or any(instance.puts_wait for instance in self._instances),
        )

    @property
    def queued(self) -> int:
        """Number of operations in all queues."""
        return sum(instance.queued for instance in self._instances)

    @property
    def put_bytes_per_s(self) -> float:
        """Moving average of the rate of all threads together while puts run; 0.0 until measured."""
        return self._puts.bytes_per_s

    @property
    def get_bytes_per_s(self) -> float:
        return self._gets.bytes_per_s

    def wait_connected(self, timeout_s: float) -> bool:
        """Block until every instance was reached once; return False on timeout. For start-up
        only."""
        until = time.monotonic() + timeout_s
        while not all(self.run_ids):
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True


__all__ = ["CLOSED", "DataPlane", "GetResult", "PutResult", "Tuning", "rendezvous"]
