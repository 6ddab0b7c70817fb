"""The planner's rules one by one: queueing, schedules, replica fit, sleep and consolidation."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import pytest

from baton_operator.autoscaling.planner.plan import plan_replicas
from baton_operator.autoscaling.planner.load_model import servers_for
from baton_operator.autoscaling.planner.replica_pair import Pair, Rules, fit
from baton_operator.autoscaling.planner.replica_limits import active, ranges
from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.inputs import ReplicaRange, Phase, AutoscalingPolicy, ScalingReason, Schedule
from tests.support.planner.builders import (
    NOW,
    POLICY,
    bounded,
    decide,
    demand,
    observed_pool,
    node,
    nodes,
)

DAY = 24 * 60


def test_one_server_is_enough_up_to_the_load_of_the_m_m_1_formula() -> None:
    # M/M/1: P(wait > t) = a exp(-(1 - a) t / S); with t = S one server holds 95 % up to a = 0.116.
    for load in (0.05, 0.1, 0.13, 0.5):
        expected = load * exp(-(1.0 - load)) <= 0.05
        assert (servers_for(load, 1.0, 1.0, 0.95) == 1) == expected


def test_servers_agree_with_a_table_of_erlang_c() -> None:
    # C(5, 4) = 0.5541, C(6, 4) = 0.2848, C(7, 4) = 0.1351, C(8, 4) = 0.0590: no wait at all.
    assert servers_for(4.0, 1.0, 0.0, 0.44) == 5
    assert servers_for(4.0, 1.0, 0.0, 0.45) == 6
    assert servers_for(4.0, 1.0, 0.0, 0.865) == 8
    assert servers_for(4.0, 1.0, 0.0, 0.86) == 7


def test_more_load_needs_no_fewer_servers_and_no_load_needs_none() -> None:
    found = [servers_for(0.1 * step, 0.3, 0.5, 0.95) for step in range(400)]
    assert found == sorted(found)
    assert found[0] == 0
    assert all(number > 0.1 * step for step, number in enumerate(found) if step)


@pytest.mark.parametrize(
    ("minute", "inside"),
    [(22 * 60, True), (22 * 60 - 1, False), (DAY + 6 * 60 - 1, True), (DAY + 6 * 60, False)],
)
def test_a_schedule_over_midnight_belongs_to_the_day_it_begins(minute: int, inside: bool) -> None:
    night = Schedule(days=frozenset({0}), from_minute=22 * 60, to_minute=6 * 60)
    assert active(night, minute) == inside


def test_sundays_night_ends_on_monday() -> None:
    night = Schedule(days=frozenset({6}), from_minute=22 * 60, to_minute=6 * 60)
    assert active(night, 0)
    assert not active(night, DAY)


def test_a_schedule_that_ends_where_it_begins_lasts_a_day() -> None:
    day = Schedule(days=frozenset({1}), from_minute=480, to_minute=480)
    assert active(day, DAY + 480)
    assert active(day, 2 * DAY + 479)
    assert not active(day, DAY + 479)
    assert not active(day, 2 * DAY + 480)


def test_the_later_of_two_schedules_wins_separately_for_minimum_and_maximum() -> None:
    days = frozenset(range(7))
    first = Schedule(
        days=days, from_minute=0, to_minute=DAY, min_replicas={"decode": 5}, max_replicas={"decode": 7}
    )
    second = Schedule(days=days, from_minute=0, to_minute=60, min_replicas={"decode": 2})
    policy = bounded((1, 9), (1, 9), schedules=(first, second))
    both, alone = ranges(policy, 30)["decode"], ranges(policy, 90)["decode"]
    assert (both.min_replicas, both.max_replicas) == (2, 7)
    assert (alone.min_replicas, alone.max_replicas) == (5, 7)


def test_a_schedule_only_raises_minima_and_only_lowers_maxima() -> None:
    days = frozenset(range(7))
    wide = Schedule(
        days=days, from_minute=0, to_minute=0, min_replicas={"prefill": 1}, max_replicas={"prefill": 50}
    )
    found = ranges(bounded((3, 5), (1, 9), schedules=(wide,)), 0)["prefill"]
    assert (found.min_replicas, found.max_replicas) == (3, 5)


def test_a_minimum_over_the_maximum_is_lowered_to_it() -> None:
    days = frozenset(range(7))
    narrow = Schedule(days=days, from_minute=0, to_minute=0, max_replicas={"prefill": 2})
    found = ranges(bounded((3, 5), (1, 9), schedules=(narrow,)), 0)["prefill"]
    assert (found.min_replicas, found.max_replicas) == (2, 2)


@pytest.mark.parametrize(
    ("want", "rules", "expected"),
    [
        ((4, 4), {}, (4, 4)),
        ((1, 6), {"ratio_min": 0.5}, (3, 6)),
        ((6, 1), {"ratio_max": 2.0}, (6, 3)),
        ((9, 2), {"ratio_max": 1.0}, (6, 6)),  # decode saturates at 6: prefill is lowered
        ((2, 6), {"ratio_min": 2.0}, (8, 4)),  # prefill saturates at 8: decode is lowered
        ((6, 6), {"budget": 6}, (3, 3)),
        ((8, 4), {"budget": 6}, (4, 2)),
        ((4, 4), {"budget": 8, "there": (6, 2)}, (4, 2)),  # shrink first
        ((4, 4), {"budget": 8, "there": (4, 2), "draining": (2, 0)}, (4, 2)),
        ((4, 4), {"budget": 8, "there": (4, 2), "draining": (1, 0)}, (4, 3)),
        ((4, 4), {"budget": 8, "there": (4, 2)}, (4, 4)),
        ((8, 1), {"budget": 4, "ratio_max": 2.0}, (2, 1)),
        ((4, 4), {"budget": 1}, None),
        ((1, 1), {"ratio_min": 9.0}, None),
    ],
)
def test_the_best_pair_obeys_ratio_and_budget(
    want: Pair, rules: dict[str, float], expected: Pair | None
) -> None:
    made = replace(Rules(gpus=(1, 1)), **rules)  # type: ignore[arg-type]
    assert fit(want, (1, 1), (8, 6), made) == expected


def test_starting_nodes_are_not_requested_twice() -> None:
    started = (*nodes(demand(20.0), 2, 2), node("prefill", 2, Phase.PENDING, since_s=0.0))
    first = decide(observed_pool(2, 2, 20.0))
    second = decide(observed_pool(3, 2, 20.0, nodes=started))
    assert (first.prefill, second.prefill) == (3, 3)
    assert not second.acts


def test_requests_queued_for_prefill_count_for_decode() -> None:
    calm = observed_pool(8, 2, 20.0)
    queue = tuple(
        replace(one, queued_tokens=60_000) if one.role == "prefill" else one for one in calm.nodes
    )
    assert decide(calm).decode == 2
    assert decide(replace(calm, nodes=queue)).decode > 2


def test_a_held_request_wakes_the_minimum_pair_even_without_a_known_capability() -> None:
    policy = bounded((2, 9), (3, 9), scale_to_zero_after_s=300.0)
    found = decide(observed_pool(0, 0, demand=demand(0.0, held=1, idle_s=0.0), capability=None), policy)
    assert (found.prefill, found.decode, found.reason) == (2, 3, ScalingReason.WOKEN)


def test_a_sleeping_pool_without_demand_data_wakes_only_for_a_schedule() -> None:
    policy = replace(POLICY, scale_to_zero_after_s=300.0)
    found = decide(observed_pool(0, 0, demand=None), policy)
    assert (found.prefill, found.decode, found.reason) == (0, 0, ScalingReason.DEMAND_UNKNOWN)
    day = Schedule(days=frozenset({0}), from_minute=0, to_minute=DAY, min_replicas={"decode": 1})
    found = decide(observed_pool(0, 0, demand=None), replace(policy, schedules=(day,)))
    assert (found.prefill, found.decode, found.reason) == (1, 1, ScalingReason.WOKEN)


@pytest.mark.parametrize(
    "change",
    [{"held": 1}, {"held": None}, {"live_requests": 1}, {"idle_s": 299.0}, {"idle_s": None}],
)
def test_a_pool_goes_to_sleep_only_if_nothing_waits_or_runs(change: dict[str, Any]) -> None:
    policy = replace(POLICY, scale_to_zero_after_s=300.0)
    found = decide(observed_pool(2, 2, demand=demand(0.0, **change)), policy)
    assert min(found.prefill, found.decode) >= 1


def test_a_pool_goes_to_sleep_only_if_its_routers_hold_requests_and_then_stays_asleep() -> None:
    policy = replace(POLICY, scale_to_zero_after_s=300.0)
    awake, asleep = observed_pool(2, 2, 0.0), observed_pool(0, 0, 0.0)
    assert decide(awake, policy).reason == ScalingReason.IDLE
    assert decide(replace(awake, holds=False), policy).decode >= 1
    assert decide(replace(asleep, holds=False), policy).reason == ScalingReason.ASLEEP


def test_a_pool_without_prefill_nodes_has_no_ratio() -> None:
    policy = bounded((0, 0), (1, 9), ratio_min=0.5, ratio_max=2.0)
    found = decide(observed_pool(0, 2, 10.0), policy)
    assert (found.prefill, found.decode) == (0, 1)


def test_the_message_explains_the_numbers_of_both_roles() -> None:
    found = decide(observed_pool(2, 2, 20.0))
    assert found.message == (
        "prefill 2 -> 3 (DemandRose: 18,000 uncached prompt tokens/s, "
        "a node computes 10,000 tokens/s, 3 needed for TTFT 2 s); "
        "decode 2 (Steady: 4,000 output tokens/s, 67 live requests with "
        "1,015 tokens of KV each, a node holds 198 at ITL 50 ms, 2 needed)"
    )
    assert found.numbers["prefill_tokens_per_s"] == 18_000.0
    assert found.numbers["decode_live_requests"] == 67.0
    assert found.numbers["prefill_needed"] == 3.0


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
    nodes_ = tuple(replace(one, **gauges) if one.role == "prefill" else one for one in calm.nodes)
    found = decide(replace(calm, nodes=nodes_))
    assert (found.prefill, found.reason) == (2, ScalingReason.CONSOLIDATION_REFUSED)
    assert message in found.message


def test_an_observation_in_several_looks_is_recorded_once() -> None:
    """If reading the index fails, the next look has the same numbers at a higher age."""
    _, memory = plan_replicas(observed_pool(2, 2, demand=demand(10.0, age_s=3.0)), POLICY, PlannerMemory())
    again = replace(observed_pool(2, 2, demand=demand(10.0, age_s=18.0)), at_s=NOW + 15.0)
    _, memory = plan_replicas(again, POLICY, memory)
    assert [one.at_s for one in memory.demand] == [NOW - 3.0]
    assert [one.at_s for one in memory.recommendations] == [NOW, NOW + 15.0]


def test_a_node_added_for_a_missed_target_stays() -> None:
    """The planner adds a node for a missed ITL, which its model alone does not call for."""
    policy = AutoscalingPolicy(
        ranges={"prefill": ReplicaRange(max_replicas=9), "decode": ReplicaRange(max_replicas=9)},
        down_stabilization_s=60.0,
    )
    memory, decode, itl_s = PlannerMemory(), 2, 0.08
    for turn in range(14):
        observed = demand(20.0, decode, itl_s=itl_s)
        found, memory = plan_replicas(
            replace(observed_pool(3, decode, demand=observed), at_s=15.0 * turn), policy, memory
        )
        itl_s = 0.08 if found.decode < 3 else 0.02
        decode = found.decode
    assert decode == 3
