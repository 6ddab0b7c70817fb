"""When a pool sleeps, and what wakes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton_operator.autoscaling.planner.inputs import ScheduledRange
from baton_operator.autoscaling.planner.reasons import ScalingReason
from tests.support.planner.builders import POLICY, bounded, decide, demand, observed_pool

SLEEPY = replace(POLICY, scale_to_zero_after_s=300.0)


def test_a_held_request_wakes_the_minimum_pair_even_without_a_known_capability() -> None:
    policy = bounded((2, 9), (3, 9), scale_to_zero_after_s=300.0)
    held = demand(0.0, held=1, idle_s=0.0)
    decision = decide(observed_pool(0, 0, demand=held, capability=None), policy)
    assert (decision.prefill, decision.decode, decision.reason) == (2, 3, ScalingReason.WOKEN)


def test_a_sleeping_pool_without_demand_data_wakes_only_for_a_schedule() -> None:
    asleep = observed_pool(0, 0, demand=None)
    decision = decide(asleep, SLEEPY)
    assert (decision.prefill, decision.decode) == (0, 0)
    assert decision.reason == ScalingReason.DEMAND_UNKNOWN
    day = ScheduledRange(min_replicas={"decode": 1})
    decision = decide(asleep, replace(SLEEPY, active_schedules=(day,)))
    assert (decision.prefill, decision.decode, decision.reason) == (1, 1, ScalingReason.WOKEN)


@pytest.mark.parametrize(
    "change",
    [{"held": 1}, {"held": None}, {"live_requests": 1}, {"idle_s": 299.0}, {"idle_s": None}],
)
def test_a_pool_goes_to_sleep_only_if_nothing_waits_or_runs(change: dict[str, Any]) -> None:
    decision = decide(observed_pool(2, 2, demand=demand(0.0, **change)), SLEEPY)
    assert min(decision.prefill, decision.decode) >= 1


def test_a_pool_goes_to_sleep_only_if_its_routers_hold_requests_and_then_stays_asleep() -> None:
    awake, asleep = observed_pool(2, 2, 0.0), observed_pool(0, 0, 0.0)
    assert decide(awake, SLEEPY).reason == ScalingReason.IDLE
    assert decide(replace(awake, routers_hold=False), SLEEPY).decode >= 1
    assert decide(replace(asleep, routers_hold=False), SLEEPY).reason == ScalingReason.ASLEEP
