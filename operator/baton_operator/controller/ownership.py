"""Which of several operators manages a pool: the one that the pool's status names.

Two installations may serve the same namespaces by mistake. If both applied their own objects, each
would undo the other's writes forever. So the first writes its name into the pool's status before
it changes anything, and renews it as a heartbeat. Another operator that sees a living holder only
records that it is there, and the holder reports both in the condition SoleOperator.

In: the record in the status, time. Out: whether this operator acts, and the record to write first.
All replicas and all restarts of one installation have the same name, so they continue at once.
Nobody trusts another machine's clock: a record is dead if it has not changed for GONE_S on the
reader's own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import msgspec
from msgspec import UNSET

from baton_operator.api.status import OperatorStatus
from baton_operator.api.times import age_s, stamp

# A write per pool and minute. A holder that misses two is gone after the third.
HEARTBEAT_S = 60.0
GONE_S = 180.0
# Times in the status have whole seconds.
ROUNDING_S = 1.0


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """`acts`: this operator manages the pool. `record`: to be written before anything else, None if
    the pool has it already. `again_s`: seconds until the record is due again."""

    acts: bool
    record: OperatorStatus | None
    again_s: float = HEARTBEAT_S


class Ownership:
    """For one pool and one operator. `name` is the installation's, as NAMESPACE/NAME; `clock` is
    monotonic, in seconds."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        # The last mark of the holder and of the other operator, and since when it is unchanged.
        self._marks: dict[str, tuple[tuple[str, str], float]] = {}

    def turn(self, record: OperatorStatus | None, now: datetime) -> Turn:
        """`record` is the one in the pool's status, `now` the time of day."""
        moment = stamp(now)
        if record is None:
            return Turn(acts=True, record=OperatorStatus(name=self.name, time=moment))
        if record.name == self.name:
            return self._keep(record, now)
        if self._is_gone("holder", record.name, record.time):
            return Turn(acts=True, record=OperatorStatus(name=self.name, time=moment))
        return self._stay_away(record, now)

    def _keep(self, record: OperatorStatus, now: datetime) -> Turn:
        living = record.other and not self._is_gone("other", record.other, record.other_time or "")
        kept = record if living else msgspec.structs.replace(record, other="", other_time=UNSET)
        left_s = _left_s(record.time, now)
        if left_s <= 0:
            return Turn(acts=True, record=msgspec.structs.replace(kept, time=stamp(now)))
        return Turn(acts=True, record=kept if kept != record else None, again_s=left_s)

    def _stay_away(self, record: OperatorStatus, now: datetime) -> Turn:
        """Only one other operator is recorded: a third waits until the second's mark is dead."""
        mark_time = record.other_time or ""
        if record.other not in ("", self.name):
            if not self._is_gone("other", record.other, mark_time):
                return Turn(acts=False, record=None)
        elif record.other and (left_s := _left_s(mark_time, now)) > 0:
            return Turn(acts=False, record=None, again_s=left_s)
        mark = msgspec.structs.replace(record, other=self.name, other_time=stamp(now))
        return Turn(acts=False, record=mark)

    def _is_gone(self, part: str, name: str, time: str) -> bool:
        last = self._marks.get(part)
        if last is None or last[0] != (name, time):
            self._marks[part] = last = ((name, time), self._clock())
        return self._clock() - last[1] >= GONE_S


def _left_s(time: str, now: datetime) -> float:
    """Seconds until a mark of our own is due again; 0 also for one that is in the future, because
    a clock was set back."""
    age = age_s(time, now)
    return HEARTBEAT_S - age + ROUNDING_S if 0 <= age < HEARTBEAT_S else 0.0
