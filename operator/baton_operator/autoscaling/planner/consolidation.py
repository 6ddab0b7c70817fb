"""Checks whether fewer nodes would meet the targets, before a role shrinks.

In: the reports of a role's nodes, and the number of nodes that remain. Out: None, or why they do
not suffice. The remaining nodes take over the queue, batch and KV of the others, and may use half
of the headroom. `load_model` answers the same question from rates and a model, this module from the
nodes' current load and the clients' latencies. A role shrinks only if both agree.
"""

from __future__ import annotations

from baton_operator.autoscaling.planner.inputs import (
    AutoscalingPolicy,
    Capability,
    Demand,
    RoleNodes,
)
from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.recommendation import KnownInputs

# The remaining nodes must have less than this share of the load at which a target was missed.
NEAR_MISS = 0.95


def why_too_few(
    remaining: int,
    nodes: RoleNodes,
    inputs: KnownInputs,
    policy: AutoscalingPolicy,
    memory: PlannerMemory,
) -> str | None:
    """Why the remaining nodes are too few, for people; None if they suffice."""
    if inputs.demand is None or inputs.capability is None:
        return None
    if remaining >= len(nodes.ready) or remaining <= 0:
        return None
    miss = memory.newest_miss(nodes.role)
    load = inputs.load_of(nodes.role) / remaining
    if miss is not None and load >= NEAR_MISS * miss.load:
        return (
            f"the remaining {remaining} would get {load:,.0f} tokens/s each, and the target was"
            f" missed at {miss.load:,.0f}"
        )
    if nodes.role == "prefill":
        return _too_few_prefill(remaining, nodes, inputs.demand, inputs.capability, policy)
    return _too_few_decode(remaining, nodes, inputs, policy)


def _too_few_prefill(
    remaining: int,
    nodes: RoleNodes,
    demand: Demand,
    capability: Capability,
    policy: AutoscalingPolicy,
) -> str | None:
    if demand.ttft_s is not None and demand.ttft_s > policy.ttft_s:
        return f"TTFT {demand.ttft_s:.2f} s exceeds {policy.ttft_s:g} s"
    queued = nodes.total(lambda node: node.queued_tokens)
    busy = nodes.total(lambda node: node.busy)
    if queued is None and busy is None and demand.ttft_s is None:
        return "queue lengths and TTFT are unknown"
    wait_s = (queued or 0.0) / remaining / capability.prefill_tokens
    if wait_s > policy.ttft_s:
        return f"the remaining {remaining} would need {wait_s:.1f} s for the queued tokens"
    if busy is not None and busy / remaining > 1.0 - policy.headroom / 2.0:
        percent = 100.0 * busy / remaining
        return f"the remaining {remaining} would be busy {percent:.0f} % of the time"
    return None


def _too_few_decode(
    remaining: int, nodes: RoleNodes, inputs: KnownInputs, policy: AutoscalingPolicy
) -> str | None:
    demand, capability, forecast = inputs.demand, inputs.capability, inputs.forecast
    assert demand is not None
    assert capability is not None
    if demand.itl_s is not None and demand.itl_s > policy.itl_s:
        return f"ITL {1e3 * demand.itl_s:.0f} ms exceeds {1e3 * policy.itl_s:.0f} ms"
    running = _first_known(
        nodes.total(lambda node: node.running), forecast.live if forecast else None
    )
    context = forecast.context if forecast else None
    by_context = running * context if running and context else running
    kv = _first_known(nodes.total(lambda node: node.kv_tokens), demand.live_kv_tokens, by_context)
    if running is None or kv is None:
        return "batch sizes and KV usage are unknown"
    step_s = (
        capability.step_base_s
        + running / remaining * capability.step_per_seq_s
        + kv / remaining * capability.step_per_kv_token_s
    )
    if step_s > policy.itl_s and running > remaining:
        return (
            f"a step on the remaining {remaining} would take {1e3 * step_s:.0f} ms, over "
            f"{1e3 * policy.itl_s:.0f}"
        )
    room = 1.0 - policy.headroom / 2.0
    if capability.kv_capacity and kv / remaining > room * capability.kv_capacity:
        return (
            f"KV would fill {100.0 * kv / remaining / capability.kv_capacity:.0f} % of the "
            f"remaining {remaining}"
        )
    return None


def _first_known(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
