"""The planner's decisions on their way to the pool's index, where routers read them.

In: decisions as they are made. Out: writes, each with all that the index does not have yet. While
the index fails, the last ones are kept. Nothing of the operator depends on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime

from baton_kvstore.index.decisions import KEPT, Decisions
from baton_operator.state.observed import Planned
from baton_protocol.store import ScalingDecision

LONGEST_MESSAGE = 1024  # characters


class DecisionLog:
    """The log of one pool; for one event loop."""

    def __init__(self) -> None:
        self._unwritten: deque[ScalingDecision] = deque(maxlen=KEPT)

    @property
    def unwritten(self) -> tuple[ScalingDecision, ...]:
        return tuple(self._unwritten)

    def note(self, planned: Planned, at: datetime) -> None:
        self._unwritten.append(
            ScalingDecision(
                at_ms=round(1e3 * at.timestamp()),
                prefill=planned.prefill,
                decode=planned.decode,
                reason=planned.reason,
                message=planned.message[:LONGEST_MESSAGE],
            )
        )

    async def write(self, url: str, pool: str, addresses: Sequence[str]) -> None:
        """Write what is not written yet to the index at `url`, whose host has these addresses.
        Raise StoreUnavailable without forgetting any."""
        decisions = self.unwritten
        if not decisions:
            return
        async with Decisions(url, pool, addresses) as index:
            await index.add(decisions)
        left = (decision for decision in self._unwritten if decision not in decisions)
        self._unwritten = deque(left, KEPT)
