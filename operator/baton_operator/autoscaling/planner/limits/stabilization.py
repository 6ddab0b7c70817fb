"""Stabilization: up to the minimum of the up window, down to the maximum of the down window.

In: a course, and earlier needs (including the current one). Out: the course. No role shrinks before
a whole window was observed, so a restarted operator waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton_operator.autoscaling.planner.demand.need import Course
from baton_operator.autoscaling.planner.memory import Memory
from baton_operator.autoscaling.planner.records import Policy, Reason
from baton_protocol.store import Role


def stabilised(course: Course, memory: Memory, policy: Policy, at_s: float) -> Course:
    if course.value > course.now:
        if course.now == 0:
            return course  # a request to a sleeping pool has waited long enough
        window = policy.up_stabilisation_s
        value = max(course.now, min(within(memory, course.role, at_s, window)))
        bound = f"fewer were needed within the last {window:g} s"
        return course.to(value, Reason.UP_STABILISING, bound)
    if course.value < course.now:
        window = policy.down_stabilisation_s
        seen_s = at_s - (at_s if memory.since_s is None else memory.since_s)
        value = min(course.now, max(within(memory, course.role, at_s, window)))
        if seen_s < window:
            bound = f"observed for {seen_s:.0f} s of {window:g} s"
            return course.to(course.now, Reason.DOWN_STABILISING, bound)
        bound = f"{value} were needed within the last {window:g} s"
        return course.to(value, Reason.DOWN_STABILISING, bound)
    return course


def within(memory: Memory, role: Role, at_s: float, window_s: float) -> Iterator[int]:
    """The needs in the window, including the current one."""
    return (need.of(role) for need in memory.needed if need.at_s >= at_s - window_s)
