"""How many nodes a role needs for its load, or why that is unknown; then it keeps its nodes.

In: the planner's view. Out: a `Course` per role, which the later rules change; a rule that changes
the number becomes the reason. Unknown never means zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton_operator.autoscaling.planner.demand.decode_need import decode_need
from baton_operator.autoscaling.planner.demand.forecast import Outlook
from baton_operator.autoscaling.planner.demand.prefill_need import Need, prefill_need
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import Capability, Demand, Policy, Reason, Situation
from baton_protocol.store import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A role's number on its way through the rules. `text`: what the load needs. `bounds`: what
    each rule did; the last one is the reason. `blind`: the unknown input without which the number
    may not shrink."""

    role: Role
    now: int
    value: int
    reason: Reason
    text: str
    bounds: tuple[str, ...] = ()
    blind: tuple[Reason, str] | None = None
    need: Need | None = None

    def to(self, value: int, reason: Reason, bound: str) -> Course:
        if value == self.value:
            return self
        return replace(self, value=value, reason=reason, bounds=(*self.bounds, bound))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerView:
    """The known inputs. `unknown` says why there are none, for both roles."""

    demand: Demand | None = None
    capability: Capability | None = None
    outlook: Outlook | None = None
    unknown: tuple[Reason, str] | None = None


def why_unknown(situation: Situation, policy: Policy) -> tuple[Reason, str] | None:
    """Why the load cannot be judged; None if it can."""
    demand, capability = situation.demand, situation.capability
    if demand is None:
        return Reason.DEMAND_UNKNOWN, "no router has reported its load"
    if demand.age_s > policy.stale_after_s:
        return Reason.DEMAND_STALE, (
            f"the latest load report is {demand.age_s:.0f} s old, over the limit of "
            f"{policy.stale_after_s:g} s"
        )
    if capability is None or capability.prefill_tokens <= 0.0 or capability.step_base_s <= 0.0:
        return Reason.CAPABILITY_UNKNOWN, "no node has measured its speed yet"
    return None


def needed(fleet: RoleCounts, prefill: RoleCounts, view: PlannerView, policy: Policy) -> Course:
    """The need before stabilization and limits."""
    if view.unknown is not None:
        return _stay(fleet, *view.unknown)
    assert view.capability is not None
    assert view.outlook is not None
    outlook = view.outlook
    if fleet.role == "prefill":
        if outlook.prompt is None:
            return _stay(
                fleet, Reason.DEMAND_UNKNOWN, "the rate of uncached prompt tokens is unknown"
            )
        course = _from_need(fleet, prefill_need(outlook, fleet, view.capability, policy))
        complete = _knows_all_of_prefill(outlook)
    else:
        if outlook.output is None and outlook.live is None:
            return _stay(fleet, Reason.DEMAND_UNKNOWN, "the rate of output tokens is unknown")
        course = _from_need(fleet, decode_need(outlook, prefill, view.capability, policy))
        complete = _knows_all_of_decode(outlook)
    if not complete:
        return _no_less(course, Reason.DEMAND_UNKNOWN, "part of the load is unknown")
    if fleet.silent:
        names = ", ".join(fleet.silent[:3])
        return _no_less(course, Reason.NODES_SILENT, f"no recent report from {names}")
    return course


def _knows_all_of_prefill(outlook: Outlook) -> bool:
    return outlook.prompt == 0.0 or outlook.prompt_mean is not None


def _knows_all_of_decode(outlook: Outlook) -> bool:
    if outlook.output is None or outlook.live is None:
        return False
    nothing_to_do = outlook.output == 0.0 and outlook.live == 0.0
    return nothing_to_do or outlook.context is not None


def _stay(fleet: RoleCounts, reason: Reason, text: str) -> Course:
    return Course(role=fleet.role, now=fleet.desired, value=fleet.desired, reason=reason, text=text)


def _no_less(course: Course, reason: Reason, text: str) -> Course:
    """The known inputs may raise the number but not lower it."""
    course = replace(course, blind=(reason, text))
    if course.value > course.now:
        return course
    return replace(course, value=course.now, reason=reason, bounds=(text,))


def _from_need(fleet: RoleCounts, need: Need) -> Course:
    now = fleet.desired
    bounds: tuple[str, ...] = ()
    value = now
    if need.least > now:
        value, reason = need.good, _why_more(need, now)
    elif need.good < now:
        value, reason = need.good, Reason.DEMAND_FELL
    elif fleet.coming and need.good > len(fleet.ready):
        reason = Reason.CAPACITY_COMING
        oldest = max(node.since_s for node in fleet.coming)
        bounds = (f"{len(fleet.coming)} starting, the oldest for {oldest:.0f} s",)
    else:
        reason = Reason.STEADY
    return Course(
        role=fleet.role,
        now=now,
        value=value,
        reason=reason,
        text=need.text,
        bounds=bounds,
        need=need,
    )


def _why_more(need: Need, now: int) -> Reason:
    if not need.reachable:
        return Reason.TARGET_UNREACHABLE
    if need.now > now:
        return Reason.DEMAND_ROSE
    if need.ahead > now:
        return Reason.TREND_ROSE
    return Reason.BACKLOG_GREW
