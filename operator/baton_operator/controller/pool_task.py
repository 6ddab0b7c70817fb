"""One asyncio task per pool: it waits until its pool is due, reconciles it and reschedules it.

In: wake-ups from watch events of the pool and its children, and from timers. Out: each outcome,
counted and logged once. A task starts when its pool is first seen and ends when the pool is gone;
owner references then delete the children. A refused child is retried with a backoff of up to a
minute. If only the server did not answer, the backoff ends at 10 s, so that pools recover soon
after an outage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from baton_operator.controller.due_time import LONGEST_RETRY_S, SETTLE_S, DueTime
from baton_operator.controller.reconcile import Incomplete, PoolGone, Reconciler
from baton_operator.kube.client import ApiError, ApiUnavailable, Conflict, Refused, TooManyRequests
from baton_operator.metrics import Metrics, Result
from baton_operator.state.cache import PoolKey

logger = logging.getLogger(__name__)
OUTAGE_RETRY_S = 10.0


class PoolTask:
    """The task of one pool. It holds one of `slots` during a reconcile."""

    def __init__(
        self,
        key: PoolKey,
        reconciler: Reconciler,
        slots: asyncio.Semaphore,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._key = key
        self._reconciler = reconciler
        self._slots = slots
        self._metrics = metrics
        self._clock = clock
        self.due_time = DueTime(clock)
        self._begun: float | None = None

    @property
    def waits(self) -> bool:
        """Whether it is due and waits for a slot. Safe to call from another thread."""
        return self._begun is None and self.due_time.due_s == 0

    @property
    def busy_s(self) -> float:
        """Seconds since the current reconcile started; 0 if none runs."""
        return 0.0 if self._begun is None else self._clock() - self._begun

    async def run(self) -> None:
        """Return when the pool is gone."""
        polling = asyncio.create_task(self._reconciler.poll_index())
        try:
            while True:
                await self.due_time.wait_until_due()
                async with self._slots:
                    await self._reconcile_measured()
        except PoolGone:
            self._metrics.count_reconcile("done")
        finally:
            polling.cancel()
            self._reconciler.forget_pool()
            await asyncio.wait([polling])

    async def _reconcile_measured(self) -> None:
        self.due_time.begin()
        begun = self._begun = self._clock()
        try:
            self._metrics.count_reconcile(await self._reconcile())
        finally:
            self._begun = None
            self._metrics.reconcile_seconds.observe(self._clock() - begun)

    async def _reconcile(self) -> Result:
        try:
            again_s = await self._reconciler.reconcile()
        except PoolGone:
            raise
        except TooManyRequests as error:
            self._retry_later(error, least_s=error.retry_after_s)
            return "throttled"
        except ApiUnavailable as error:
            self._retry_later(error, most_s=OUTAGE_RETRY_S)
            return "unavailable"
        except Conflict as error:
            self._retry_later(error, most_s=OUTAGE_RETRY_S)
            return "conflict"
        except (Incomplete, Refused) as error:
            self._retry_later(error)
            return "refused"
        except Exception:
            logger.exception("pool %s", self._key)
            self.due_time.fail()
            return "error"
        self.due_time.succeed()
        if again_s is not None:
            self.due_time.request(again_s)
        return "done"

    def _retry_later(
        self, error: ApiError | Incomplete, least_s: float = 0.0, most_s: float = LONGEST_RETRY_S
    ) -> None:
        delay_s = self.due_time.fail(least_s, most_s)
        logger.info("pool %s: retry in %.1f s: %s", self._key, delay_s, error)


class PoolTasks:
    """The tasks of all pools. At most `slots` of them reconcile at a time. `make_reconciler`
    returns None for a pool that does not exist."""

    def __init__(
        self,
        make_reconciler: Callable[[PoolKey], Reconciler | None],
        slots: int,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._make_reconciler = make_reconciler
        self._slots = asyncio.Semaphore(slots)
        self._metrics = metrics
        self._clock = clock
        self._tasks: dict[PoolKey, PoolTask] = {}
        self._group: asyncio.TaskGroup | None = None

    def depth(self) -> int:
        """Number of pools that are due and wait for a slot. Safe to call from another thread."""
        return sum(task.waits for task in list(self._tasks.values()))

    def longest_s(self) -> float:
        """Seconds for which the slowest current reconcile has been running."""
        return max((task.busy_s for task in self._tasks.values()), default=0.0)

    def wake_pool(self, key: PoolKey, after_s: float = SETTLE_S) -> None:
        """Schedule a reconcile of the pool. No-op before `run` and for a pool that is gone."""
        task = self._tasks.get(key) or self._start_task(key)
        if task is not None:
            task.due_time.request(after_s)

    async def run(self, pools: Iterable[PoolKey]) -> None:
        """Reconcile these pools and every new one, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for key in pools:
                    self.wake_pool(key)
                # kopf ends by cancelling every task that is younger than itself, including this
                # one; the task group then cancels all others.
                await self._group.create_task(asyncio.Event().wait())
        finally:
            self._group = None

    def _start_task(self, key: PoolKey) -> PoolTask | None:
        if self._group is None or (reconciler := self._make_reconciler(key)) is None:
            return None
        task = self._tasks[key] = PoolTask(key, reconciler, self._slots, self._metrics, self._clock)
        self._group.create_task(self._run(key, task))
        return task

    async def _run(self, key: PoolKey, task: PoolTask) -> None:
        try:
            await task.run()
        finally:
            del self._tasks[key]
        self.wake_pool(key)  # another pool may have this name now
