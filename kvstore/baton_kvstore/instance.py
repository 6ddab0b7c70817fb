"""One data server, its queue and its transfer threads.

In: operations, from any thread, never blocking it. Out: each settles exactly once: served, refused
by an open circuit, too long in the queue, or closed. A thread owns its connection; it is reopened
after any error, and an operation that broke an *old* connection is repeated once on a new one (the
server may have been restarted meanwhile; SET and GET may be repeated).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from baton_kvstore.circuit import Circuit
from baton_kvstore.endpoint import Endpoint
from baton_kvstore.errors import LinkBroken, StoreUnavailable
from baton_kvstore.keys import DEFAULT_TTL_S
from baton_kvstore.operations import Get, Operation
from baton_kvstore.rate import RateMeter
from baton_kvstore.resp import RespConnection
from baton_kvstore.staging import StagingPool

logger = logging.getLogger(__name__)
CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Times and rates of the data plane. Seconds, bytes per second."""

    ttl_base_s: float = DEFAULT_TTL_S
    connect_timeout_s: float = 1.0
    deadline_base_s: float = 2.0
    floor_bytes_per_s: float = 8 << 20
    queue_limit_s: float = 30.0
    backoff_first_s: float = 0.1
    backoff_limit_s: float = 2.0

    def deadline_s(self, size: int) -> float:
        """base + bytes / floor rate: what a transfer of `size` bytes may take. 1 MiB: 2.125 s."""
        return self.deadline_base_s + size / self.floor_bytes_per_s


@dataclass(frozen=True, slots=True)
class Shared:
    """What the instances of one data plane share."""

    staging: StagingPool
    value_bytes: int
    puts: RateMeter
    gets: RateMeter
    tuning: Tuning


class Instance:
    """Server number `number` of the data role."""

    def __init__(self, number: int, endpoint: Endpoint, threads: int, shared: Shared) -> None:
        self.number = number
        self.label = endpoint.label
        self.run_id = ""
        self._shared = shared
        tuning = shared.tuning
        self._circuit = Circuit(tuning.backoff_first_s, tuning.backoff_limit_s)
        self._changed = threading.Condition()
        self._urgent: deque[Operation] = deque()
        self._relaxed: deque[Operation] = deque()
        self._closing = False
        self._links = [RespConnection(endpoint, tuning.connect_timeout_s) for _ in range(threads)]
        self._threads = [
            threading.Thread(
                target=self._work, args=(link,), name=f"kv-{number}-{lane}", daemon=True
            )
            for lane, link in enumerate(self._links)
        ]

    @property
    def trouble(self) -> str:
        """Why operations are refused now, "" if they are not."""
        return self._circuit.reason

    @property
    def queued(self) -> int:
        """Operations accepted and not yet begun."""
        return len(self._urgent) + len(self._relaxed)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, operation: Operation) -> None:
        operation.queued_at = time.monotonic()
        with self._changed:
            if not self._closing:
                (self._urgent if operation.urgent else self._relaxed).append(operation)
                self._changed.notify()
                return
        self._settle(operation, CLOSED)

    def stop(self) -> None:
        """Refuse what is queued, cut what is running. join() waits for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
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
        while (operation := self._take(wait=False)) is not None:
            self._settle(operation, CLOSED)  # never started

    # --- in a transfer thread --------------------------------------------------------------

    def _work(self, link: RespConnection) -> None:
        self._reopen(link)
        while (operation := self._take(wait=True, link=link)) is not None:
            self._serve(link, operation)
        link.close()

    def _take(self, wait: bool, link: RespConnection | None = None) -> Operation | None:
        """The next operation, urgent ones first. Meanwhile probe a lost server when that is due.
        None: closing, and nothing is queued."""
        while True:
            with self._changed:
                pause = self._circuit.wait_s()
                probe = link is not None and not self._closing and pause == 0.0
                if not probe:
                    for queue in (self._urgent, self._relaxed):
                        if queue:
                            return queue.popleft()
                    if self._closing or not wait:
                        return None
                    self._changed.wait(pause)
            if probe and link is not None and self._circuit.claim_probe():
                self._reopen(link)

    def _reopen(self, link: RespConnection) -> None:
        began = time.monotonic()
        try:
            self.run_id = link.open(began + self._shared.tuning.connect_timeout_s).run_id
        except StoreUnavailable as error:
            self._fail(error, began)
        else:
            self._circuit.succeed()

    def _fail(self, error: StoreUnavailable, began: float) -> None:
        if self._closing:
            return
        was_closed = not self._circuit.reason
        if self._circuit.fail(str(error), began):
            if was_closed:
                logger.warning("data instance %d: %s", self.number, error)
            with self._changed:
                self._changed.notify_all()  # sleepers must learn when to probe

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
        if self._closing:
            return CLOSED
        if self._circuit.reason:
            return f"data instance {self.number} is down: {self._circuit.reason}"
        waited = time.monotonic() - operation.queued_at
        if waited > self._shared.tuning.queue_limit_s:
            return f"waited {waited:.0f} s for data instance {self.number}: it is too slow"
        return ""

    def _transfer(self, link: RespConnection, operation: Operation, buffer: memoryview) -> str:
        size = self._shared.value_bytes
        operation.stage(buffer[:size])
        began = time.monotonic()
        deadline = began + self._shared.tuning.deadline_s(size)
        reason = ""
        for _ in range(2):
            fresh = not link.is_open
            if self._closing:
                return CLOSED
            try:
                if fresh:
                    self.run_id = link.open(deadline).run_id
                    self._circuit.succeed()
                reason = self._exchange(link, operation, deadline, buffer)
                break
            except LinkBroken as error:
                if fresh or self._closing:
                    self._fail(error, began)
                    return CLOSED if self._closing else str(error)
            except StoreUnavailable as error:
                self._fail(error, began)
                return str(error)
        if not reason:
            operation.deliver(buffer[:size])
        return reason

    def _exchange(
        self, link: RespConnection, operation: Operation, deadline: float, buffer: memoryview
    ) -> str:
        meter = self._shared.gets if isinstance(operation, Get) else self._shared.puts
        moved = 0
        meter.begin()
        try:
            reason = operation.exchange(link, deadline, self.number, buffer)
            moved = 0 if reason else self._shared.value_bytes
            return reason
        finally:
            meter.end(moved)

    def _settle(self, operation: Operation, reason: str, seconds: float = 0.0) -> None:
        try:
            operation.settle(reason, seconds)
        except Exception:
            logger.exception("a transfer's callback failed")
