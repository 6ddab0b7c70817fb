"""Which pool is to be looked at next, and when.

In: keys, marked by watch events, by time, by failures. Out: one key at a time to each worker. A key
marked ten times is handed out once, never to two workers at a time, and once more if it was marked
meanwhile. `Schedule` is the arithmetic, without waiting; `WorkQueue` lets workers wait for it.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")

# A change of a pool is a burst of events; a pause as short as this makes one reconcile of it.
SETTLE_S = 0.05
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class Schedule(Generic[K]):
    """Each key is due at one moment at most: the earliest that was asked for."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` gives numbers from 0 up to 1."""
        self._jitter = jitter
        self._due: dict[K, float] = {}
        # Moments that were moved or taken stay in the heap until they come up.
        self._heap: list[tuple[float, int, K]] = []
        self._pushed = 0
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}

    def depth(self, now: float) -> int:
        """Keys that wait and are due."""
        return sum(at <= now for at in list(self._due.values()))

    def add(self, key: K, at: float) -> None:
        at = max(at, self._not_before.get(key, at))
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            self._push(key, at)

    def take(self, now: float) -> K | None:
        """The key that has been due longest and that nobody works on."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._busy.add(key)
        return key

    def next_due(self) -> float | None:
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def done(self, key: K) -> None:
        """`key` was dealt with, so that its next failure is its first."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._free(key)

    def failed(self, key: K, now: float, least: float, most: float) -> float:
        """`key` shall be tried again; returns in how many seconds: twice as long each time, up to
        `most`, but never less than `least`, whatever marks come before."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(most, FIRST_RETRY_S * 2.0 ** min(count, 30))
        # Up to a quarter less, so that those that failed together do not come back together.
        delay = max(least, delay * (1 - self._jitter() / 4))
        if least > 0:
            earliest = self._not_before[key] = now + least
            if self._due.get(key, earliest) < earliest:
                self._due[key] = earliest
        self.add(key, now + delay)
        self._free(key)
        return delay

    def _free(self, key: K) -> None:
        self._busy.discard(key)
        if key in self._due:
            self._push(key, self._due[key])

    def _push(self, key: K, at: float) -> None:
        self._pushed += 1  # the heap never compares keys
        heapq.heappush(self._heap, (at, self._pushed, key))

    def _drop_stale(self) -> None:
        """A busy key's moment is dropped too: `_free` pushes it again."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at and key not in self._busy:
                return
            heapq.heappop(self._heap)


class WorkQueue(Generic[K]):
    """A Schedule that workers of one event loop wait for."""

    def __init__(
        self, clock: Callable[[], float], jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._schedule: Schedule[K] = Schedule(jitter)
        self._changed = asyncio.Event()

    def depth(self) -> int:
        """How many are due and wait for a worker. May be asked by another thread."""
        return self._schedule.depth(self._clock())

    def add(self, key: K, after_s: float = SETTLE_S) -> None:
        self._schedule.add(key, self._clock() + after_s)
        self._changed.set()

    async def take(self) -> K:
        """Wait for a key; every one that was taken must be given to done() or failed()."""
        while True:
            key = self._schedule.take(self._clock())
            if key is not None:
                self._changed.set()  # another one may be due: a colleague shall look
                return key
            due = self._schedule.next_due()
            self._changed.clear()
            try:
                async with asyncio.timeout(None if due is None else max(0, due - self._clock())):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def done(self, key: K) -> None:
        self._schedule.done(key)
        self._changed.set()

    def failed(self, key: K, least_s: float = 0.0, most_s: float = LONGEST_RETRY_S) -> float:
        delay = self._schedule.failed(key, self._clock(), least_s, most_s)
        self._changed.set()
        return delay
