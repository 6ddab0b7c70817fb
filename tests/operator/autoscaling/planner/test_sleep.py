"""A pool whose engines sleep: its nodes count like any others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton_operator.autoscaling.planner.inputs import PoolObservation
from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.plan import plan_replicas
from baton_operator.autoscaling.planner.reasons import ScalingReason
from tests.support.planner.builders import (
    POLICY,
    bounded,
    decide,
    demand,
    memory_of_needs,
    observed_pool,
)


def with_sleepers(observation: PoolObservation, *roles: str) -> PoolObservation:
    nodes = tuple(replace(node, asleep=node.role in roles) for node in observation.nodes)
    return replace(observation, nodes=nodes)


@pytest.mark.parametrize(
    ("requests", "held"), [(0.0, 0), (0.0, 1), (10.0, 0)], ids=["idle", "woken", "in use"]
)
@pytest.mark.parametrize("memory", [PlannerMemory(), memory_of_needs()], ids=["new", "old"])
def test_the_counts_are_those_of_a_pool_that_is_awake(
    requests: float, held: int, memory: PlannerMemory
) -> None:
    awake = observed_pool(4, 4, demand=demand(requests, held=held))
    asleep = with_sleepers(awake, "prefill", "decode")
    decisions = [plan_replicas(pool, POLICY, memory)[0] for pool in (awake, asleep)]
    assert len({(decision.prefill, decision.decode) for decision in decisions}) == 1


def test_the_reason_is_sleep_only_while_every_node_sleeps_and_no_count_changes() -> None:
    policy = bounded((2, 9), (2, 9))
    pool = observed_pool(2, 2, 0.0)
    everyone = with_sleepers(pool, "prefill", "decode")
    assert decide(everyone, policy).reason == ScalingReason.NODES_ASLEEP
    assert decide(with_sleepers(pool, "decode"), policy).reason == ScalingReason.AT_MINIMUM
    assert decide(everyone, bounded((3, 9), (2, 9))).reason == ScalingReason.AT_MINIMUM
    silent = replace(everyone, nodes=tuple(replace(n, age_s=600.0) for n in everyone.nodes))
    assert decide(silent, policy).reason != ScalingReason.NODES_ASLEEP


def test_a_sleeping_pool_scales_to_zero_like_any_other_idle_pool() -> None:
    pool = with_sleepers(observed_pool(2, 2, 0.0), "prefill", "decode")
    decision = decide(pool, replace(POLICY, scale_to_zero_after_s=300.0))
    assert (decision.decode, decision.reason) == (0, ScalingReason.IDLE)
