"""The data plane: chunks in and out of the data instances, beside the memory they live in.

    plane = DataPlane(urls, layout, fingerprint, epoch)
    plane.start()
    plane.submit_put(hash, tokens, depth, fill, copied, done, priority, direct)
    plane.submit_get(hash, marker, depth, sink, done, priority, direct)
    plane.close()

Nothing here blocks the caller: submit_* queues, transfer threads (blocking sockets, their own
connection each) do the rest and call back. Callbacks run in a transfer thread, must be short, and
each operation settles exactly once: `done` always comes, after `copied` for a put, and by
`Tuning.settled_s` of its size (and what callbacks take). A chunk goes, with all its head shards, to
the instance that rendezvous hashing gives among those that take puts; it is read where its marker
says.

Each byte that is copied costs throughput. So a payload that a socket can reach is not copied:
`direct` is where it lies, in pieces and in order. One that is elsewhere (on a device, or in head
shards) goes through staging buffers, by `fill` and `sink`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import xxhash

from baton_kvstore.connection.endpoint import Endpoint, parse_endpoint
from baton_kvstore.connection.resp import RespConnection
from baton_kvstore.connection.server_settings import CareMode
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
from baton_protocol.store import DataInstance, Marker, Priority

logger = logging.getLogger(__name__)
CLOSED = "closed"


class Instance:
    """One data server, its queue and its transfer threads.

    In: operations, from any thread, never blocking it. Out: each settles exactly once: served,
    refused by an open circuit, too long in the queue, or closed. A thread owns its connection; it
    is reopened after any error, and an operation that broke an *old* connection is repeated once on
    a new one (the server may have been restarted meanwhile; SET and GET may be repeated).

    With two threads one hashes, and copies, while the other one's bytes are on their way.

    Server number `number` of the data role.
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
        """The last one seen, "" before the first connection."""
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
        """Operations accepted and not yet begun."""
        return self._lanes.queued

    @property
    def puts_wait(self) -> bool:
        """Whether puts are queued that somebody waits for."""
        return self._lanes.puts_wait

    @property
    def now(self) -> DataInstance:
        """What is known of the server."""
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
        """Refuse what is queued, cut what is running. join() waits for it."""
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
            self._settle(operation, CLOSED)  # never started

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
        """Run one operation to its end. The outer edge for what callbacks may raise."""
        reason, started = self._refusal(operation), time.monotonic()
        buffer = None if reason else self._shared.staging.borrow()
        if buffer is None:
            self._settle(operation, reason or CLOSED)
            return
        try:
            reason = self._transfer(link, operation, buffer)
        except Exception as error:
            logger.exception("transfer of chunk failed")
            link.close()  # who knows what it was doing
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
            return f"data instance {self.number} takes no chunks: {self.put_trouble}"
        waited = self._lanes.waited_s(operation)
        if waited > self._shared.tuning.queue_limit_s:
            return f"waited {waited:.0f} s for data instance {self.number}: it is too slow"
        return ""

    def _transfer(self, link: RespConnection, operation: Operation, buffer: memoryview) -> str:
        """Each shard in turn. The deadline is that of the whole, and counts transfers only."""
        size, shards = self._shared.value_bytes, self._shared.shards
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
            moved = 0 if reason else self._shared.value_bytes
        finally:
            meter.end(moved)
        if reason == MISSING:  # a small answer
            self._check.round_trip_s.add(time.monotonic() - began)
        return reason

    def _settle(self, operation: Operation, reason: str, seconds: float = 0.0) -> None:
        try:
            operation.settle(reason, seconds)
        except Exception:
            logger.exception("a transfer's callback failed")


def rendezvous(chunk: BlockHash, labels: Sequence[str]) -> int:
    """Index of the instance a chunk is written to: the highest of one digest per instance.

    Another instance takes 1/(N+1) of the chunks from all others alike and moves no other.
    """
    weights = [xxhash.xxh3_64_intdigest(chunk + label.encode()) for label in labels]
    return max(range(len(weights)), key=weights.__getitem__)


class DataPlane:
    """All data instances of one node. Make, start() and close() it in one thread; submit from any.

    Raise StoreMisconfigured for a bad URL or a layout this version cannot move. A server that is
    down is no error here: its operations settle with a reason, and it is probed until it is back.

    `write_behind_bandwidth` is in bytes per second: None is a share of what puts reach, 0 is off.
    `settings` says whether the servers' are seen to at their (re)connection; None: not at all.
    """

    def __init__(
        self,
        urls: Sequence[str],
        layout: KVLayout,
        fingerprint: Fingerprint,
        epoch: Epoch,
        *,
        write_behind_bandwidth: float | None = None,
        settings: CareMode | None = None,
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
        size = self._format.value_bytes
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
        self.draining = False  # while set, writing behind has no limit

    def start(self) -> None:
        """Start the transfer threads; they connect at once."""
        for instance in self._instances:
            instance.start()

    def close(self) -> None:
        """Settle everything outstanding with reason "closed" and join the threads."""
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
    ) -> None:
        """Store a chunk. `fill(view, shard)` writes the `layout.shard_bytes` bytes of one head
        shard; `copied` says that the source is free; `done` brings the marker to write on the
        index: all shards were acknowledged. `depth` is the chunk's index in its chain.

        With `direct` the payload is read there instead, and again if it has to be sent again: it
        must not change before `copied`, which comes when the put has settled."""
        self._check(direct)
        operation = Put(self._format, chunk, tokens, depth, fill, copied, done, priority, direct)
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
        """Fetch a chunk. `sink(view, shard)` is called with each head shard's verified payload, and
        only then; the view is dead when it returns. No shard comes after one that was lost, so what
        was written is of use only where the result is ok. A marker that cannot be true settles at
        once, in this thread.

        With `direct` the payload is received there instead, unverified: the pieces may hold
        anything until `done`, and after it unless it is ok. None is a block, of as many as there
        are pieces, that is not written."""
        self._check(direct)
        operation = Get(self._format, chunk, marker, depth, sink, done, priority, direct)
        layout = self._format.layout
        wrong = ""
        if not 0 <= marker.instance < len(self._instances):
            wrong = f"{MISSING}: no data instance {marker.instance} among {len(self._instances)}"
        elif (marker.payload_bytes, marker.shards) != (layout.chunk_bytes, layout.kv_shards):
            wrong = f"{MISSING}: {marker.payload_bytes} bytes in {marker.shards} shards stored"
        if wrong:
            operation.settle(operation.lost(wrong), 0.0)
            return
        self._instances[marker.instance].submit(operation)

    def _check(self, direct: Pieces | None) -> None:
        """A wrong size would be taken for a corrupt value."""
        if direct is None:
            return
        layout = self._format.layout
        share = layout.chunk_bytes // max(1, len(direct))
        sizes = [share if piece is None else len(piece) for piece in direct]
        if layout.kv_shards != 1 or sum(sizes) != layout.chunk_bytes or len(set(sizes)) != 1:
            raise ValueError(
                f"direct has pieces of {sizes} bytes; give equal ones of {layout.chunk_bytes} in "
                f"all, and none where kv_shards is not 1 (it is {layout.kv_shards})"
            )

    def instance_for(self, chunk: BlockHash) -> int:
        """Where a chunk is written now (see `rendezvous`): readers ask its marker."""
        everyone = range(len(self._instances))
        usable = [number for number in everyone if not self._instances[number].put_trouble]
        numbers = usable or everyone
        return numbers[rendezvous(chunk, [self._labels[number] for number in numbers])]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Per instance the run id last seen, "" before the first connection."""
        return tuple(instance.run_id for instance in self._instances)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Per instance why it is refused now, "" if it is not."""
        return tuple(instance.trouble for instance in self._instances)

    @property
    def put_troubles(self) -> tuple[str, ...]:
        """Per instance why it takes no puts now, "" if it does."""
        return tuple(instance.put_trouble for instance in self._instances)

    def instances(self) -> tuple[DataInstance, ...]:
        """The servers as they are now, in the order of their URLs. Cheap: nobody is asked."""
        return tuple(instance.now for instance in self._instances)

    def take_behind(self, size: int) -> bool:
        """Whether `size` bytes may be written behind now; True counts them as written. Only the
        thread that submits them asks."""
        if self.draining:
            return True
        now = self.instances()
        bounded = [each for each in now if each.limit_bytes]
        return self._behind.take(
            size,
            put_bytes_per_s=self.put_bytes_per_s,
            fullest=max((each.used_bytes / each.limit_bytes for each in bounded), default=0.0),
            others=any(each.put_trouble for each in now)
            or any(instance.puts_wait for instance in self._instances),
        )

    @property
    def queued(self) -> int:
        """Operations accepted and not yet begun."""
        return sum(instance.queued for instance in self._instances)

    @property
    def put_bytes_per_s(self) -> float:
        """Moving average while puts ran, all threads together; 0.0 until measured."""
        return self._puts.bytes_per_s

    @property
    def get_bytes_per_s(self) -> float:
        return self._gets.bytes_per_s

    def wait_connected(self, timeout_s: float) -> bool:
        """Block until every instance was reached once; False on timeout. For start-up only."""
        until = time.monotonic() + timeout_s
        while not all(self.run_ids):
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True


__all__ = ["CLOSED", "DataPlane", "GetResult", "PutResult", "Tuning", "rendezvous"]
