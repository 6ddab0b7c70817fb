"""One asyncio task per pool: it waits until its pool is due, reconciles it, decides when to again.

In: marks, from watch events of a pool and its children, and by time. Out: every outcome counted and
logged once. A task begins when its pool is first seen, and ends when the pool is gone: its owner
references delete the children. A refused child is tried more and more seldom, up to a minute; where
only the server did not answer, every 10 s at least, so that nobody waits long after an outage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from baton_operator.controller.schedule import SETTLE_S, Schedule
from baton_operator.kube.client import ApiError, Conflict, Refused, TooManyRequests, Unavailable
from baton_operator.metrics import Metrics, Result
from baton_operator.state.cache import PoolKey

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
