"""The reference autoscalers decide as their documentation describes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baton_operator.autoscaling.planner.inputs import Demand, ObservedNode, Phase, PoolObservation
from baton_protocol.store import Role
from benchmarks.support.autoscaling.reference_autoscalers import (
    STALE_S,
    Hpa,
    Kpa,
    Scaler,
    hpa_count,
    kpa_count,
)

TARGETS: Mapping[Role, float] = {"prefill": 1.0, "decode": 10.0}
LIMITS = (1, 20)


def situation(
    at_s: float, decode: int, requests: int | None, *, age_s: float = 3.0, held: int = 0
) -> PoolObservation:
    """Return a situation with one quiet prefill node, and decode nodes with `requests` in total."""
    prefill = ObservedNode(name="p", role="prefill", phase=Phase.READY, running=1, waiting=0)
    nodes = [
        ObservedNode(
            name=f"d{number}",
            role="decode",
            phase=Phase.READY,
            running=(requests or 0) if number == 0 else 0,
            waiting=0,
        )
        for number in range(decode)
    ]
    demand = None if requests is None else Demand(window_s=60.0, age_s=age_s, held=held)
    return PoolObservation(
        at_s=at_s,
        nodes=(prefill, *nodes),
        current_replicas={"prefill": 1, "decode": decode},
        demand=demand,
        capability=None,
    )


def follow(scaler: Scaler, decode: int, requests: list[int]) -> list[int]:
    """Return the counts of one decision every 15 s, each applied at once."""
    counts = []
    for tick, load in enumerate(requests):
        decode = scaler.decide(situation(15.0 * tick, decode, load))["decode"]
        counts.append(decode)
    return counts


@pytest.mark.parametrize(
    ("value", "have", "wanted"),
    [(100.0, 10, 10), (109.0, 10, 10), (111.0, 10, 12), (91.0, 10, 10), (85.0, 10, 9), (0.0, 3, 0)],
)
def test_hpa_wants_the_value_divided_by_the_target_outside_its_tolerance(
    value: float, have: int, wanted: int
) -> None:
    assert hpa_count(value, 10.0, have) == wanted


def test_hpa_adds_at_most_four_pods_or_doubles_the_count() -> None:
    assert follow(Hpa(TARGETS, LIMITS), 1, [500, 500, 500]) == [5, 10, 20]


def test_hpa_scales_down_after_300_s_without_a_higher_recommendation() -> None:
    found = follow(Hpa(TARGETS, LIMITS), 5, [50] + [10] * 25)
    assert found[:21] == [5] * 21
    assert found[21:] == [1] * 5


@pytest.mark.parametrize("rival", [Hpa, Kpa])
def test_both_keep_the_count_without_a_fresh_value(rival: type[Hpa] | type[Kpa]) -> None:
    scaler = rival(TARGETS, LIMITS)
    assert scaler.decide(situation(0.0, 4, None))["decode"] == 4
    assert scaler.decide(situation(0.0, 4, 0, age_s=STALE_S + 1.0))["decode"] == 4


@pytest.mark.parametrize("rival", [Hpa, Kpa])
def test_both_count_the_requests_that_routers_hold(rival: type[Hpa] | type[Kpa]) -> None:
    wanted = rival(TARGETS, LIMITS).decide(situation(0.0, 0, 0, held=5))
    assert wanted["decode"] >= 1


def test_kpa_at_most_doubles_or_halves_the_ready_nodes() -> None:
    assert [kpa_count(value, 10.0, 4) for value in (500.0, 60.0, 10.0)] == [8, 6, 2]


def test_kpa_panics_at_twice_the_load_and_then_does_not_scale_down() -> None:
    quiet, burst = [20] * 12, [80] * 4
    found = follow(Kpa(TARGETS, LIMITS), 2, quiet + burst + [20] * 11)
    assert found[:12] == [2] * 12
    peak = max(found)
    assert peak >= 4
    assert found[found.index(peak) :] == [peak] * (len(found) - found.index(peak))


def test_kpa_scales_down_after_300_quiet_seconds() -> None:
    found = follow(Kpa(TARGETS, LIMITS), 6, [20] * 30)
    assert found[:20] == [6] * 20
    assert found[-1] < 6
