"""One data server, its queue and its transfer threads.

In: operations, from any thread, never blocking it. Out: each settles exactly once: served, refused
by an open circuit, too long in the queue, or closed. A thread owns its connection; it is reopened
after any error, and an operation that broke an *old* connection is repeated once on a new one (the
server may have been restarted meanwhile; SET and GET may be repeated).

With two threads one hashes, and copies, while the other one's bytes are on their way.
"""

from __future__ import annotations

import logging
import threading
import time

from baton_kvstore.connection.endpoint import Endpoint
from baton_kvstore.connection.resp import RespConnection
from baton_kvstore.data.priority_queues import PriorityQueues
from baton_kvstore.data.server_check import ServerCheck
from baton_kvstore.data.transfer_rate import RateMeter
from baton_kvstore.data.transfers import MISSING, Operation
from baton_kvstore.data.tuning import Shared
from baton_kvstore.errors import LinkBroken, StoreUnavailable
from baton_protocol.store import DataInstance

logger = logging.getLogger(__name__)
CLOSED = "closed"


class Instance:
    """Server number `number` of the data role."""

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
