"""The workers: take a pool, look at it, decide when to look again.

In: a queue, and what to do with a pool. Out: every outcome counted and logged once, the pool back
in the queue where it is to be tried again. A refused child is tried more and more seldom, up to a
minute; where only the server did not answer, every 10 s at least, so that nobody waits long after
an outage.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from baton_operator.controller.queue import WorkQueue
from baton_operator.kube.client import ApiError, Conflict, Refused, TooManyRequests, Unavailable
from baton_operator.metrics import Metrics, Result
from baton_operator.state.cache import PoolKey

logger = logging.getLogger(__name__)

OUTAGE_RETRY_S = 10.0


class Incomplete(Exception):
    """Some children were refused; the pool is to be tried again."""


class Workers:
    """Run `work` in as many tasks as pools may be looked at at a time."""

    def __init__(
        self,
        queue: WorkQueue[PoolKey],
        reconcile: Callable[[PoolKey], Awaitable[float | None]],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._metrics = metrics
        self._clock = clock
        self._begun: dict[PoolKey, float] = {}

    def longest_s(self) -> float:
        """For how long the slowest look has been going on."""
        now = self._clock()
        return now - min(self._begun.values(), default=now)

    async def work(self) -> None:
        while True:
            key = await self._queue.take()
            begun = self._begun[key] = self._clock()
            try:
                self._metrics.reconciled(await self._look(key))
            finally:
                del self._begun[key]
                self._metrics.reconcile_seconds.observe(self._clock() - begun)

    async def _look(self, key: PoolKey) -> Result:
        try:
            again_s = await self._reconcile(key)
        except TooManyRequests as error:
            self._failed(key, error, least_s=error.retry_after_s)
            return "throttled"
        except Unavailable as error:
            self._failed(key, error, most_s=OUTAGE_RETRY_S)
            return "unavailable"
        except Conflict as error:
            self._failed(key, error, most_s=OUTAGE_RETRY_S)
            return "conflict"
        except (Incomplete, Refused) as error:
            self._failed(key, error)
            return "refused"
        except Exception:
            logger.exception("pool %s", key)
            self._queue.failed(key)
            return "error"
        self._queue.done(key)
        if again_s is not None:
            self._queue.add(key, again_s)
        return "done"

    def _failed(
        self,
        key: PoolKey,
        error: ApiError | Incomplete,
        least_s: float = 0.0,
        most_s: float = 60.0,
    ) -> None:
        delay = self._queue.failed(key, least_s, most_s)
        logger.info("pool %s: again in %.1f s: %s", key, delay, error)
