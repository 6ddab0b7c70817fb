"""Instance: one data server with its queue of operations and its transfer threads."""

from __future__ import annotations

import logging
import threading
import time

from baton_kvstore.connection.endpoint import Endpoint
from baton_kvstore.connection.large_sends import SendTurns
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.data.priority_queues import PriorityQueues
from baton_kvstore.data.rate_meter import RateMeter
from baton_kvstore.data.server_check import ServerCheck
from baton_kvstore.data.shared import Shared
from baton_kvstore.data.transfers import (
    MISSING,
    Operation,
)
from baton_kvstore.errors import LinkBroken, StoreUnavailable
from baton_protocol.store import DataInstance

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
        turns = SendTurns()
        self._links = [
            RespConnection(endpoint, tuning.connect_timeout_s, turns) for _ in range(threads)
        ]
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
        if not self._lanes.push_operation(operation):
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
        while (operation := self._lanes.take_operation(0, 0.0)) is not None:
            self._settle(operation, CLOSED)  # the threads were never started

    # --- in a transfer thread --------------------------------------------------------------

    def _work(self, link: RespConnection) -> None:
        self._check.reopen_link(link)
        while True:
            seen, idle = self._lanes.changes, not self._lanes.queued
            if not self._lanes.closed:
                check = self._check.next_check(link, idle)
                if check is not None:
                    check(link)
                    continue
            operation = self._lanes.take_operation(seen, self._check.pause_s(link, idle))
            if operation is not None:
                self._serve(link, operation)
                self._lanes.finish_operation()
            elif self._lanes.closed:
                break
        link.close()

    def _serve(self, link: RespConnection, operation: Operation) -> None:
        """Run one operation and settle it. Catches whatever the callbacks raise."""
        reason, started = self._refusal(operation), time.monotonic()
        buffer = None if reason else self._shared.staging.borrow_buffer()
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
            self._shared.staging.return_buffer(buffer)
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
                    self._check.note_refused_put(reason, began)
                return reason
            left -= time.monotonic() - began
            operation.deliver(buffer, shard)
        if operation.is_put:
            self._check.note_put()
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
                    self._check.open_link(link, deadline)
                return self._exchange(link, operation, deadline, buffer, shard)
            except StoreUnavailable as error:
                if self._lanes.closed:
                    break
                if fresh or not isinstance(error, LinkBroken):
                    self._check.note_lost(str(error), began)
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
        meter.begin_transfer()
        try:
            reason = operation.exchange(link, deadline, self.number, buffer, shard)
            moved = 0 if reason else operation.value_bytes
        finally:
            meter.end_transfer(moved)
        if reason == MISSING:  # a reply without a value takes one round trip
            self._check.round_trip_s.add(time.monotonic() - began)
        return reason

    def _settle(self, operation: Operation, reason: str, seconds: float = 0.0) -> None:
        try:
            operation.settle(reason, seconds)
        except Exception:
            logger.exception("a transfer's callback failed")
