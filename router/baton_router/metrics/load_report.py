"""Reports the load of this router to the index every `every_s` seconds.

In: the router's current report. Out: announcements that expire soon after the last one. A separate
task sends them, so nothing waits for the index. While the index is down, reports are skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton_kvstore.errors import StoreError
from baton_kvstore.index.registry import Registry
from baton_protocol.store import RouterReport

# The first held request may wake a pool without nodes, so it is reported within this time. A check
# takes about 0.3 us per running request.
LOOK_S = 0.2

logger = logging.getLogger(__name__)


class LoadReporter:
    """Call `send_reports()` until cancelled, then `withdraw_report()`."""

    def __init__(
        self,
        registry: Registry,
        report: Callable[[], RouterReport],
        clock: Callable[[], float],
        *,
        every_s: float,
        ttl_s: float,
    ) -> None:
        self._registry = registry
        self._report = report
        self._clock = clock
        self._every_s = every_s
        self._ttl_s = ttl_s
        self._announced_as: str | None = None  # the router's name in the last report
        self._index_down = False

    async def send_reports(self) -> None:
        due = self._clock()
        held = 0
        while True:
            report = self._report()
            if self._clock() >= due or (report.held and not held):
                due = self._clock() + self._every_s
                held = report.held
                await self._announce(report)
            await asyncio.sleep(LOOK_S)

    async def withdraw_report(self) -> None:
        """Remove the report at a clean end. If the index is down, the report expires by itself."""
        if self._announced_as is None or self._index_down:
            return
        try:
            await self._registry.withdraw_router(self._announced_as)
        except StoreError as error:
            logger.info(
                "cannot withdraw this router's load report, which expires by itself: %s", error
            )

    async def _announce(self, report: RouterReport) -> None:
        self._announced_as = report.router
        try:
            await self._registry.announce_router(report, self._ttl_s)
        except StoreError as error:
            if not self._index_down:
                logger.warning("the index rejects this router's load reports: %s", error)
            self._index_down = True
        except Exception:
            logger.exception("sending this router's load report failed")
        else:
            self._index_down = False
