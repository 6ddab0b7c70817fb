"""Checks whether fewer nodes would meet the targets, before a role shrinks.

In: the reports of a role's nodes, and the number of nodes that remain. Out: None, or why they do
not suffice. The remaining nodes take over the queue, batch and KV of the others, and may use half
of the headroom. `need` answers the same question from rates and a model, this module from the
nodes' current load and the clients' latencies. A role shrinks only if both agree.
"""

from __future__ import annotations

from baton_operator.autoscaling.planner.demand.measured import load_of
from baton_operator.autoscaling.planner.demand.need import Course, PlannerView
from baton_operator.autoscaling.planner.memory import Memory
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import Capability, Demand, Policy

# The remaining nodes must have less than this share of the load at which a target was missed.
NEAR_MISS = 0.95


def refusal(
    course: Course, left: int, fleet: RoleCounts, view: PlannerView, policy: Policy, memory: Memory
) -> str | None:
    """Why `left` nodes are too few, for people; None if they suffice."""
    if view.demand is None or view.capability is None or left >= len(fleet.ready) or left <= 0:
        return None
    miss = memory.miss(course.role)
    load = load_of(course, view) / left
    if miss is not None and load >= NEAR_MISS * miss.load:
        return (
            f"the remaining {left} would get {load:,.0f} tokens/s each, and the target was missed"
            f" at {miss.load:,.0f}"
        )
    if course.role == "prefill":
        return _prefill(fleet, left, view.demand, view.capability, policy)
    return _decode(fleet, left, view, policy)


def _prefill(
    fleet: RoleCounts, left: int, demand: Demand, capability: Capability, policy: Policy
) -> str | None:
    if demand.ttft_s is not None and demand.ttft_s > policy.ttft_s:
        return f"TTFT {demand.ttft_s:.2f} s exceeds {policy.ttft_s:g} s"
    queued = fleet.total(lambda node: node.queued_tokens)
    busy = fleet.total(lambda node: node.busy)
    if queued is None and busy is None and demand.ttft_s is None:
        return "queue lengths and TTFT are unknown"
    wait_s = (queued or 0.0) / left / capability.prefill_tokens
    if wait_s > policy.ttft_s:
        return f"the remaining {left} would need {wait_s:.1f} s for the queued tokens"
    if busy is not None and busy / left > 1.0 - policy.headroom / 2.0:
        return f"the remaining {left} would be busy {100.0 * busy / left:.0f} % of the time"
    return None


def _decode(fleet: RoleCounts, left: int, view: PlannerView, policy: Policy) -> str | None:
    demand, capability, outlook = view.demand, view.capability, view.outlook
    assert demand is not None
    assert capability is not None
    if demand.itl_s is not None and demand.itl_s > policy.itl_s:
        return f"ITL {1e3 * demand.itl_s:.0f} ms exceeds {1e3 * policy.itl_s:.0f} ms"
    running = _first(fleet.total(lambda node: node.running), outlook.live if outlook else None)
    context = outlook.context if outlook else None
    by_context = running * context if running and context else running
    kv = _first(fleet.total(lambda node: node.kv_tokens), demand.live_kv_tokens, by_context)
    if running is None or kv is None:
        return "batch sizes and KV usage are unknown"
    step_s = (
        capability.step_base_s
        + running / left * capability.step_per_seq_s
        + kv / left * capability.step_per_kv_token_s
    )
    if step_s > policy.itl_s and running > left:
        return (
            f"a step on the remaining {left} would take {1e3 * step_s:.0f} ms, over "
            f"{1e3 * policy.itl_s:.0f}"
        )
    room = 1.0 - policy.headroom / 2.0
    if capability.kv_capacity and kv / left > room * capability.kv_capacity:
        return (
            f"KV would fill {100.0 * kv / left / capability.kv_capacity:.0f} % of the "
            f"remaining {left}"
        )
    return None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
