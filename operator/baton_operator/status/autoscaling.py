"""What the planner decided, as the status says it.

In: a View. Out: an `AutoscalingStatus`, or None where nobody plans. The numbers move all the time,
and each word of them costs a write: with the same counts and reason they are said anew once a
minute.
"""

from __future__ import annotations

import msgspec

from baton_operator.api.status import AutoscalingStatus
from baton_operator.status.view import View
from baton_operator.timestamps import is_fresh, stamp

SAY_EVERY_S = 60.0
LONGEST_WORDS = 1000


def autoscaling_status(view: View) -> AutoscalingStatus | None:
    """While nothing is decided, as of a pool that is paused or invalid, what was said last."""
    said, planned = view.before.autoscaling, view.observed.planned
    spec = view.pool.spec.autoscaling if view.pool is not None else None
    if view.pool is not None and (spec is None or not spec.is_planned):
        return None
    if planned is None:
        return said
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
    if said is None or _gist(said) != _gist(now):
        return now
    if is_fresh(said.time, view.now, SAY_EVERY_S):
        return said
    return msgspec.structs.replace(now, since=said.since)


def _gist(status: AutoscalingStatus) -> tuple[str, int, int, str]:
    return status.mode, status.desired_prefill, status.desired_decode, status.reason
