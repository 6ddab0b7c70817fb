"""Reads the planner's decisions from the index, while someone looks.

In: what the operator has written there. Out: the last decisions, the newest first. While the index
does not answer, the ones known before stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton_kvstore.errors import StoreError
from baton_kvstore.index.decisions import Decisions
from baton_router.live.records import PlannerDecision
from baton_router.live.snapshot import MOST_DECISIONS

READ_EVERY_S = 5.0

logger = logging.getLogger(__name__)


class DecisionReader:
    """`latest` are the decisions of the last read."""

    def __init__(
        self, decisions: Decisions, clock: Callable[[], float], every_s: float = READ_EVERY_S
    ) -> None:
        self.latest: tuple[PlannerDecision, ...] = ()
        self._decisions = decisions
        self._clock = clock
        self._every_s = every_s
        self._next_at = clock()

    async def keep_read(self) -> None:
        """Read every few seconds until cancelled, and not sooner after the read before."""
        while True:
            await asyncio.sleep(max(0.0, self._next_at - self._clock()))
            self._next_at = self._clock() + self._every_s
            try:
                found = await self._decisions.latest(MOST_DECISIONS)
            except StoreError as error:
                logger.debug("cannot read the planner's decisions: %s", error)
                continue
            self.latest = tuple(
                PlannerDecision(
                    decision.at_ms,
                    decision.prefill,
                    decision.decode,
                    ": ".join(filter(None, (decision.reason, decision.message))),
                )
                for decision in found
            )
