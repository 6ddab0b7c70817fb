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
import math
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from baton_operator.kube.client import ApiError, Conflict, Refused, TooManyRequests, Unavailable
from baton_operator.metrics import Metrics, Result
from baton_operator.state.cache import PoolKey

# One change of a pool is a burst of events; this pause merges them into one reconcile.
SETTLE_S = 0.05
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class Schedule:
    """The next time at which something is due: the earliest of all requested times.

    In: requests from watch events, timers and failures. Out: `wait` returns at that time. Many
    requests before `take` are one run; a request after `take` causes one more.

    For one event loop. `jitter` returns numbers in [0, 1).
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
        """Seconds until it is due; 0 if it is due now."""
        return max(0.0, self._at - self._clock())

    def add(self, after_s: float = SETTLE_S) -> None:
        at = max(self._clock() + after_s, self._not_before)
        if at < self._at:
            self._at = at
            self._moved.set()

    async def wait(self) -> None:
        """Return when it is due. The caller then calls `take`, does the work, and calls `done` or
        `failed`."""
        while (left_s := self.due_s) > 0:
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                    await self._moved.wait()

    def take(self) -> None:
        """The work starts now: later requests are for the next run."""
        self._at = math.inf

    def done(self) -> None:
        """The work succeeded: reset the backoff."""
        self._failures, self._not_before = 0, -math.inf

    def failed(self, least_s: float = 0.0, most_s: float = LONGEST_RETRY_S) -> float:
        """The work failed: schedule a retry and return its delay in seconds. The delay doubles with
        each failure up to `most_s`. No request can make it due earlier than in `least_s`."""
        delay_s = min(most_s, FIRST_RETRY_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        # Jitter of up to a quarter, so that pools that failed together do not retry together.
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
    """The API server refused some children; retry the pool."""


class PoolGone(Exception):
    """The pool is gone, or its name belongs to another pool."""


class PoolWork(Protocol):
    """The work for one pool; `Reconciler` implements it."""

    async def reconcile(self) -> float | None:
        """Return the seconds until the next reconcile; None if only a change needs one. Raise
        PoolGone, or for a retry Incomplete or ApiError."""

    async def ask_index(self) -> None:
        """Read the index concurrently, until cancelled."""

    def end(self) -> None:
        """The pool is gone, or this operator stops acting."""


class PoolTask:
    """The task of one pool. It holds one of `slots` during a reconcile."""

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
        """Whether it is due and waits for a slot. Safe to call from another thread."""
        return self._begun is None and self.schedule.due_s == 0

    @property
    def busy_s(self) -> float:
        """Seconds since the current reconcile started; 0 if none runs."""
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
        logger.info("pool %s: retry in %.1f s: %s", self._key, delay_s, error)


class PoolTasks:
    """The tasks of all pools. At most `slots` of them reconcile at a time. `work_of` returns None
    for a pool that does not exist."""

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
        """Number of pools that are due and wait for a slot. Safe to call from another thread."""
        return sum(task.waits for task in list(self._tasks.values()))

    def longest_s(self) -> float:
        """Seconds for which the slowest current reconcile has been running."""
        return max((task.busy_s for task in self._tasks.values()), default=0.0)

    def wake(self, key: PoolKey, after_s: float = SETTLE_S) -> None:
        """Schedule a reconcile of the pool. No-op before `run` and for a pool that is gone."""
        task = self._tasks.get(key) or self._begin(key)
        if task is not None:
            task.schedule.add(after_s)

    async def run(self, pools: Iterable[PoolKey]) -> None:
        """Reconcile these pools and every new one, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for key in pools:
                    self.wake(key)
                # kopf ends by cancelling every task that is younger than itself, including this
                # one; the task group then cancels all others.
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
        self.wake(key)  # another pool may have this name now
