"""PriorityQueues: the operations that wait for one data server, the most urgent first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from baton_kvstore.data.transfers import Operation
from baton_protocol.store import Priority


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

    def push_operation(self, operation: Operation) -> bool:
        """Append an operation to its lane. Return False if the queues are closed."""
        operation.queued_at = self._clock()
        with self._changed:
            if self.closed:
                return False
            self._lanes[operation.priority].append(operation)
            self._count(operation, 1)
            self._changed.notify()
            return True

    def take_operation(self, seen: int, pause_s: float | None) -> Operation | None:
        """Wait for the next operation and return it; call finish_operation() when it is done.

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

    def finish_operation(self) -> None:
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
