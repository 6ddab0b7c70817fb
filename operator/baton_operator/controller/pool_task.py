"""One asyncio task per pool: it waits until its pool is due, reconciles it, decides when to again.

In: marks, from watch events of a pool and its children, and by time. Out: every outcome counted and
logged once. A task begins when its pool is first seen, and ends when the pool is gone: its owner
references delete the children. A refused child is tried more and more seldom, up to a minute; where
only the server did not answer, every 10 s at least, so that nobody waits long after an outage.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from baton_operator.kube.client import ApiError, Conflict, Refused, TooManyRequests, Unavailable
from baton_operator.metrics import Metrics, Result
from baton_operator.state.cache import PoolKey

# A change of a pool is a burst of events; a pause as short as this makes one reconcile of it.
SETTLE_S = 0.05
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class Schedule:
    """When something is due: at one moment at most, the earliest that was asked for.

    In: marks by watch events, by time, by failures. Out: `wait` returns at that moment. What was
    marked ten times is due once, and once more if it was marked since it was taken.

    One event loop's. `jitter` gives numbers from 0 up to 1.
    """

    def __init__(
        self, clock: Callable[[], float], jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._at = math.inf
        self._not_before = -math.inf
        self._failures = 0
        self._moved = asyncio.Event()

    @property
    def due_s(self) -> float:
        """In how many seconds it is due; 0 where it is."""
        return max(0.0, self._at - self._clock())

    def add(self, after_s: float = SETTLE_S) -> None:
        at = max(self._clock() + after_s, self._not_before)
        if at < self._at:
            self._at = at
            self._moved.set()

    async def wait(self) -> None:
        """Return when it is due. Whoever then deals with it calls `take`, and `done` or `failed`
        in the end."""
        while (left_s := self.due_s) > 0:
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                    await self._moved.wait()

    def take(self) -> None:
        """It is dealt with now: marks from here on are for another time."""
        self._at = math.inf

    def done(self) -> None:
        """The next failure is the first."""
        self._failures, self._not_before = 0, -math.inf

    def failed(self, least_s: float = 0.0, most_s: float = LONGEST_RETRY_S) -> float:
        """It is to be tried again; returns in how many seconds: twice as long each time, up to
        `most_s`, but never less than `least_s`, whatever marks come before."""
        delay_s = min(most_s, FIRST_RETRY_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        # Up to a quarter less, so that those that failed together do not come back together.
        delay_s = max(least_s, delay_s * (1 - self._jitter() / 4))
        if least_s > 0:
            self._not_before = self._clock() + least_s
            if self._at < self._not_before:
                self._at = self._not_before
        self.add(delay_s)
        return delay_s


logger = logging.getLogger(__name__)

OUTAGE_RETRY_S = 10.0


class Incomplete(Exception):
    """Some children were refused; the pool is to be tried again."""


class PoolGone(Exception):
    """There is no such pool any more, or another one has its name."""


class PoolWork(Protocol):
    """What is done for one pool; `Reconciler` does it."""

    async def reconcile(self) -> float | None:
        """Return in how many seconds to look again, None where a change will say so. Raise
        PoolGone, and Incomplete or ApiError where it is to be tried again."""

    async def ask_index(self) -> None:
        """Beside it, until it is cancelled."""

    def end(self) -> None:
        """The pool is gone, or this operator acts no more."""


class PoolTask:
    """One pool's. It holds one of `slots` while it reconciles."""

    def __init__(
        self,
        key: PoolKey,
        work: PoolWork,
        slots: asyncio.Semaphore,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._key = key
        self._work = work
        self._slots = slots
        self._metrics = metrics
        self._clock = clock
        self.schedule = Schedule(clock)
        self._begun: float | None = None

    @property
    def waits(self) -> bool:
        """It is due, and no slot is free. May be asked by another thread."""
        return self._begun is None and self.schedule.due_s == 0

    @property
    def busy_s(self) -> float:
        """For how long its reconcile has been going on."""
        return 0.0 if self._begun is None else self._clock() - self._begun

    async def run(self) -> None:
        """Return when the pool is gone."""
        asking = asyncio.create_task(self._work.ask_index())
        try:
            while True:
                await self.schedule.wait()
                async with self._slots:
                    await self._measured()
        except PoolGone:
            self._metrics.reconciled("done")
        finally:
            asking.cancel()
            self._work.end()
            await asyncio.wait([asking])

    async def _measured(self) -> None:
        self.schedule.take()
        begun = self._begun = self._clock()
        try:
            self._metrics.reconciled(await self._reconcile())
        finally:
            self._begun = None
            self._metrics.reconcile_seconds.observe(self._clock() - begun)

    async def _reconcile(self) -> Result:
        try:
            again_s = await self._work.reconcile()
        except PoolGone:
            raise
        except TooManyRequests as error:
            self._failed(error, least_s=error.retry_after_s)
            return "throttled"
        except Unavailable as error:
            self._failed(error, most_s=OUTAGE_RETRY_S)
            return "unavailable"
        except Conflict as error:
            self._failed(error, most_s=OUTAGE_RETRY_S)
            return "conflict"
        except (Incomplete, Refused) as error:
            self._failed(error)
            return "refused"
        except Exception:
            logger.exception("pool %s", self._key)
            self.schedule.failed()
            return "error"
        self.schedule.done()
        if again_s is not None:
            self.schedule.add(again_s)
        return "done"

    def _failed(
        self, error: ApiError | Incomplete, least_s: float = 0.0, most_s: float = 60.0
    ) -> None:
        delay_s = self.schedule.failed(least_s, most_s)
        logger.info("pool %s: again in %.1f s: %s", self._key, delay_s, error)


class PoolTasks:
    """All pools' tasks, `slots` of which reconcile at a time. `work_of` is None for a pool that is
    not there."""

    def __init__(
        self,
        work_of: Callable[[PoolKey], PoolWork | None],
        slots: int,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._work_of = work_of
        self._slots = asyncio.Semaphore(slots)
        self._metrics = metrics
        self._clock = clock
        self._tasks: dict[PoolKey, PoolTask] = {}
        self._group: asyncio.TaskGroup | None = None

    def depth(self) -> int:
        """How many are due and wait for a slot. May be asked by another thread."""
        return sum(task.waits for task in list(self._tasks.values()))

    def longest_s(self) -> float:
        """For how long the slowest reconcile has been going on."""
        return max((task.busy_s for task in self._tasks.values()), default=0.0)

    def wake(self, key: PoolKey, after_s: float = SETTLE_S) -> None:
        """That pool is to be looked at; nothing happens before `run`, and where it is not there."""
        task = self._tasks.get(key) or self._begin(key)
        if task is not None:
            task.schedule.add(after_s)

    async def run(self, pools: Iterable[PoolKey]) -> None:
        """Look at these and at every pool that comes, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for key in pools:
                    self.wake(key)
                # kopf ends by cancelling every task that is younger than its own, so this one too:
                # then all others end with it.
                await self._group.create_task(asyncio.Event().wait())
        finally:
            self._group = None

    def _begin(self, key: PoolKey) -> PoolTask | None:
        if self._group is None or (work := self._work_of(key)) is None:
            return None
        task = self._tasks[key] = PoolTask(key, work, self._slots, self._metrics, self._clock)
        self._group.create_task(self._run(key, task))
        return task

    async def _run(self, key: PoolKey, task: PoolTask) -> None:
        try:
            await task.run()
        finally:
            del self._tasks[key]
        self.wake(key)  # another pool may have its name by now
