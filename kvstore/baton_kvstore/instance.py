"""One data server, its queue and its transfer threads.

In: operations, from any thread, never blocking it. Out: each settles exactly once: served, refused
by an open circuit, too long in the queue, or closed. A thread owns its connection; it is reopened
after any error, and an operation that broke an *old* connection is repeated once on a new one (the
server may have been restarted meanwhile; SET and GET may be repeated).

Two circuits: one for the server (does it answer), and one for its room, opened by any put that
failed and closed by a probe as big as a chunk: a server that is full, too small or too slow for
chunks answers small commands well. While nothing is to be done the first thread looks after its
connection, so that a server that is gone, frozen or restarted is noticed without traffic.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton_kvstore.circuit import Circuit
from baton_kvstore.endpoint import Endpoint
from baton_kvstore.errors import LinkBroken, ServerRefused, StoreUnavailable
from baton_kvstore.keys import DEFAULT_TTL_S, room_key
from baton_kvstore.operations import Get, Operation, refusal
from baton_kvstore.rate import RateMeter
from baton_kvstore.resp import RespConnection
from baton_kvstore.staging import StagingPool
from baton_protocol.ids import Fingerprint

logger = logging.getLogger(__name__)
CLOSED = "closed"
PROBE_TTL_MS = 1

Chore = Callable[[RespConnection], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Times and rates of the data plane. Seconds, bytes per second."""

    ttl_base_s: float = DEFAULT_TTL_S
    connect_timeout_s: float = 1.0
    deadline_base_s: float = 2.0
    floor_bytes_per_s: float = 8 << 20
    queue_limit_s: float = 30.0
    backoff_first_s: float = 0.1
    backoff_limit_s: float = 0.5
    idle_check_s: float = 0.5

    def deadline_s(self, size: int) -> float:
        """base + bytes / floor rate: what a transfer of `size` bytes may take. 1 MiB: 2.125 s."""
        return self.deadline_base_s + size / self.floor_bytes_per_s


@dataclass(frozen=True, slots=True)
class Shared:
    """What the instances of one data plane share."""

    staging: StagingPool
    fingerprint: Fingerprint
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
        self._room = Circuit(tuning.backoff_first_s, tuning.backoff_limit_s)
        self._told = False  # that there is trouble
        self._check_at = 0.0
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
    def put_trouble(self) -> str:
        """Why puts are refused now, "" if they are not."""
        return self._circuit.reason or self._room.reason

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
        """The next operation, urgent ones first; chores when they are due. None: closing, and
        nothing is queued."""
        while True:
            with self._changed:
                chore = self._chore(link) if link is not None and not self._closing else None
                if chore is None:
                    for queue in (self._urgent, self._relaxed):
                        if queue:
                            return queue.popleft()
                    if self._closing or not wait:
                        return None
                    self._changed.wait(self._pause(link))
            if chore is not None and link is not None:
                chore(link)

    def _chore(self, link: RespConnection) -> Chore | None:
        """What this thread has to do before any operation."""
        if self._circuit.reason:
            return self._reopen if self._circuit.claim_probe() else None
        if self._room.claim_probe():
            return self._probe_room
        idle = link is self._links[0] and not self.queued
        return self._check if idle and time.monotonic() >= self._check_at else None

    def _pause(self, link: RespConnection | None) -> float | None:
        """Seconds until _chore() has to be asked again; None: not before something changes."""
        if self._circuit.reason:
            return self._circuit.wait_s()
        room = self._room.wait_s()
        if link is not self._links[0]:
            return room
        check = max(0.0, self._check_at - time.monotonic())
        return check if room is None else min(check, room)

    # --- chores ----------------------------------------------------------------------------

    def _reopen(self, link: RespConnection) -> None:
        began = time.monotonic()
        try:
            self._open(link, began + self._shared.tuning.connect_timeout_s)
        except StoreUnavailable as error:
            self._fail(error, began)

    def _check(self, link: RespConnection) -> None:
        """Is the server there, and still the same? A broken connection is opened anew at once."""
        began = time.monotonic()
        try:
            if link.is_open:
                link.command(began + self._shared.tuning.connect_timeout_s, b"PING")
            else:
                self._reopen(link)
        except LinkBroken:
            self._reopen(link)
        except StoreUnavailable as error:
            self._fail(error, began)
        self._check_at = time.monotonic() + self._shared.tuning.idle_check_s

    def _probe_room(self, link: RespConnection) -> None:
        """Put as many bytes as a chunk has. One byte goes ahead: a full server refuses that too."""
        began, size = time.monotonic(), self._shared.value_bytes
        buffer = self._shared.staging.borrow()
        if buffer is None:
            return
        deadline = began + self._shared.tuning.deadline_s(size)
        try:
            if not link.is_open:
                self._open(link, deadline)
            for length in (1, size):
                key = room_key(self._shared.fingerprint)
                link.put(deadline, key, buffer[:length], PROBE_TTL_MS)
        except ServerRefused as error:
            self._refused(refusal(error), began)
        except StoreUnavailable as error:
            self._refused(str(error), began)
            self._fail(error, began)
        else:
            self._room.succeed()
            self._tell()
        finally:
            self._shared.staging.give_back(buffer)

    def _open(self, link: RespConnection, deadline: float) -> None:
        self.run_id = link.open(deadline).run_id
        self._circuit.succeed()
        self._tell()

    # --- trouble ---------------------------------------------------------------------------

    def _fail(self, error: StoreUnavailable, began: float) -> None:
        if not self._closing and self._circuit.fail(str(error), began):
            self._tell()

    def _refused(self, reason: str, began: float) -> None:
        """A put that began then failed."""
        if not self._closing and self._room.fail(reason, began):
            self._tell()

    def _tell(self) -> None:
        """Wake who has to know, and say once that there is trouble, and once that there is none."""
        with self._changed:
            self._changed.notify_all()  # sleepers must learn when to probe
            trouble = self.put_trouble
            news, self._told = bool(trouble) != self._told, bool(trouble)
        if news and trouble:
            logger.warning("data instance %d cannot be used: %s", self.number, trouble)
        elif news:
            logger.warning("data instance %d can be used again", self.number)

    # --- operations ------------------------------------------------------------------------

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
        if self._room.reason and not isinstance(operation, Get):
            return f"data instance {self.number} takes no chunks: {self._room.reason}"
        waited = time.monotonic() - operation.queued_at
        if waited > self._shared.tuning.queue_limit_s:
            return f"waited {waited:.0f} s for data instance {self.number}: it is too slow"
        return ""

    def _transfer(self, link: RespConnection, operation: Operation, buffer: memoryview) -> str:
        size = self._shared.value_bytes
        operation.stage(buffer[:size])
        began = time.monotonic()
        reason = self._attempt(link, operation, began, buffer)
        if not reason:
            operation.deliver(buffer[:size])
        elif not isinstance(operation, Get):
            self._refused(reason, began)
        return reason

    def _attempt(
        self, link: RespConnection, operation: Operation, began: float, buffer: memoryview
    ) -> str:
        deadline = began + self._shared.tuning.deadline_s(self._shared.value_bytes)
        while not self._closing:
            fresh = not link.is_open
            try:
                if fresh:
                    self._open(link, deadline)
                return self._exchange(link, operation, deadline, buffer)
            except StoreUnavailable as error:
                if self._closing:
                    break
                if fresh or not isinstance(error, LinkBroken):
                    self._fail(error, began)
                    return str(error)
        return CLOSED

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
