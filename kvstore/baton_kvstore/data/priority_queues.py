"""What waits for one data server: a lane per priority, and who may take from it.

In: operations, from any thread. Out: the next one for a transfer thread: hand-off before prefix
before write-behind, each lane in its order. Write-behind starts only where another thread stays
free, so that what comes next never waits for it (with one thread: where nothing else waits). What
waited too long comes first, since it is only refused: no lane starves beyond that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from baton_kvstore.data.transfers import Operation
from baton_protocol.store import Priority


class PriorityQueues:
    """For `threads` takers; thread-safe. `limit_s` is how long an operation may wait."""

    def __init__(
        self, threads: int, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lanes: dict[Priority, deque[Operation]] = {each: deque() for each in Priority}
        self._most_busy = max(0, threads - 2)  # when write-behind starts: this one, and a free one
        self._limit_s = limit_s
        self._clock = clock
        self._changed = threading.Condition()
        self._busy = 0
        self._waiting_puts = 0
        self.changes = 0
        self.closed = False

    @property
    def queued(self) -> int:
        """Operations pushed and not yet taken."""
        return sum(len(lane) for lane in self._lanes.values())

    @property
    def puts_wait(self) -> bool:
        """Whether puts are queued that somebody waits for."""
        return self._waiting_puts > 0

    def waited_s(self, operation: Operation) -> float:
        return self._clock() - operation.queued_at

    def push(self, operation: Operation) -> bool:
        """False: closed."""
        operation.queued_at = self._clock()
        with self._changed:
            if self.closed:
                return False
            self._lanes[operation.priority].append(operation)
            self._count(operation, 1)
            self._changed.notify()
            return True

    def take(self, seen: int, pause_s: float | None) -> Operation | None:
        """The next operation, give_back() when it is done. None after `pause_s`, at the close, and
        as soon as `changes` is not `seen`: then the caller looks at the world again."""
        with self._changed:
            operation = self._next()
            if operation is None and self.changes == seen and not self.closed:
                self._changed.wait(pause_s)
                operation = self._next()
            if operation is not None:
                self._busy += 1
            return operation

    def give_back(self) -> None:
        """A taker is done with what it took."""
        with self._changed:
            self._busy -= 1
            if self._lanes[Priority.BEHIND]:
                self._changed.notify()

    def wake(self) -> None:
        """Something changed that takers must know."""
        with self._changed:
            self.changes += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more. What is queued can still be taken."""
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
