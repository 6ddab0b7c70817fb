"""Nodes stay if fewer would miss a target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.plan import plan_replicas
from baton_operator.autoscaling.planner.reasons import ScalingReason
from tests.support.planner.builders import bounded, decide, demand, observed_pool


@pytest.mark.parametrize(
    ("change", "gauges", "message"),
    [
        ({}, {"busy": 0.6}, "the remaining 1 would be busy 120 % of the time"),
        ({}, {"queued_tokens": 15_000}, "the remaining 1 would need 3.0 s for the queued tokens"),
        ({"ttft_s": 2.5}, {}, "TTFT 2.50 s exceeds 2 s"),
        (
            {"ttft_s": None},
            {"busy": None, "queued_tokens": None},
            "queue lengths and TTFT are unknown",
        ),
    ],
)
def test_prefill_nodes_stay_if_fewer_would_miss_a_target(
    change: dict[str, Any], gauges: dict[str, Any], message: str
) -> None:
    """The rates alone need only one node of each role."""
    calm = observed_pool(2, 1, demand=demand(2.0, 1, **change))
    nodes = tuple(
        replace(node, **gauges) if node.role == "prefill" else node for node in calm.nodes
    )
    decision = decide(replace(calm, nodes=nodes))
    assert (decision.prefill, decision.reason) == (2, ScalingReason.CONSOLIDATION_REFUSED)
    assert message in decision.message


def test_a_node_added_for_a_missed_target_stays() -> None:
    """The planner adds a node for a missed ITL, which its model alone does not call for."""
    policy = bounded((1, 9), (1, 9), down_stabilization_s=60.0)
    memory, decode, itl_s = PlannerMemory(), 2, 0.08
    for turn in range(14):
        observation = observed_pool(
            3, decode, demand=demand(20.0, decode, itl_s=itl_s), at_s=15.0 * turn
        )
        decision, memory = plan_replicas(observation, policy, memory)
        itl_s = 0.08 if decision.decode < 3 else 0.02
        decode = decision.decode
    assert decode == 3
