"""The planner's last decision in the status."""

from __future__ import annotations

import msgspec

from baton_operator.api.status import AutoscalingStatus
from baton_operator.api.times import is_fresh, stamp
from baton_operator.status.view import View

# The planner's inputs change all the time, and each change costs a write of the status: while
# counts and reason stay the same they are updated only this often.
NUMBERS_EVERY_S = 60.0
LONGEST_WORDS = 1000


def autoscaling_status(view: View) -> AutoscalingStatus | None:
    """The planner's decision; without one (pool paused or invalid) the last one."""
    last, planned = view.before.autoscaling, view.observed.planned
    spec = view.pool.spec.autoscaling if view.pool is not None else None
    if view.pool is not None and (spec is None or not spec.is_planned):
        return None
    if planned is None:
        return last
    now = AutoscalingStatus(
        mode=planned.mode,
        desired_prefill=planned.prefill,
        desired_decode=planned.decode,
        reason=planned.reason,
        message=planned.message[:LONGEST_WORDS],
        numbers=planned.numbers[:LONGEST_WORDS],
        since=stamp(view.now),
        time=stamp(view.now),
    )
    if last is None or _gist(last) != _gist(now):
        return now
    if is_fresh(last.time, view.now, NUMBERS_EVERY_S):
        return last
    return msgspec.structs.replace(now, since=last.since)


def _gist(status: AutoscalingStatus) -> tuple[str, int, int, str]:
    return status.mode, status.desired_prefill, status.desired_decode, status.reason
