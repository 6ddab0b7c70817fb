"""Recommendations over time: up to the least of the up window, down to the most of the down window.

In: a course, and what was needed before (this look's need included). Out: the course. Nobody
goes down before a whole window was seen, so an operator that starts anew waits.
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
            return course  # who waits for a pool that sleeps has waited enough
        window = policy.up_stabilisation_s
        value = max(course.now, min(within(memory, course.role, at_s, window)))
        bound = f"fewer were needed in the last {window:g} s"
        return course.to(value, Reason.UP_STABILISING, bound)
    if course.value < course.now:
        window = policy.down_stabilisation_s
        seen_s = at_s - (at_s if memory.since_s is None else memory.since_s)
        value = min(course.now, max(within(memory, course.role, at_s, window)))
        if seen_s < window:
            bound = f"watched for {seen_s:.0f} s of {window:g} s"
            return course.to(course.now, Reason.DOWN_STABILISING, bound)
        bound = f"{value} were needed in the last {window:g} s"
        return course.to(value, Reason.DOWN_STABILISING, bound)
    return course


def within(memory: Memory, role: Role, at_s: float, window_s: float) -> Iterator[int]:
    """What was needed in the window; this look's need is among it."""
    return (one.of(role) for one in memory.needed if one.at_s >= at_s - window_s)
