"""Minima and maxima with schedules; pools without a ratio."""

from __future__ import annotations

import pytest

from baton_operator.autoscaling.planner.inputs import ScheduledRange
from baton_operator.autoscaling.planner.replica_limits import ranges_now
from tests.support.planner.builders import bounded, decide, observed_pool

FIVE_TO_SEVEN = ScheduledRange(min_replicas={"decode": 5}, max_replicas={"decode": 7})
AT_LEAST_TWO = ScheduledRange(min_replicas={"decode": 2})
WIDE = ScheduledRange(min_replicas={"decode": 1}, max_replicas={"decode": 50})
AT_MOST_TWO = ScheduledRange(max_replicas={"decode": 2})


@pytest.mark.parametrize(
    ("own", "schedules", "expected"),
    [
        ((1, 9), (FIVE_TO_SEVEN,), (5, 7)),
        ((1, 9), (FIVE_TO_SEVEN, AT_LEAST_TWO), (2, 7)),
        ((3, 5), (WIDE,), (3, 5)),
        ((3, 5), (AT_MOST_TWO,), (2, 2)),
        ((0, 5), (), (1, 5)),
    ],
    ids=[
        "a schedule raises the minimum and lowers the maximum",
        "the later of two wins separately for minimum and maximum",
        "a schedule lowers no minimum and raises no maximum",
        "a minimum over the maximum is lowered to it",
        "a pool that is awake has a decode node",
    ],
)
def test_the_range_that_holds_now(
    own: tuple[int, int], schedules: tuple[ScheduledRange, ...], expected: tuple[int, int]
) -> None:
    now = ranges_now(bounded((1, 9), own, active_schedules=schedules))["decode"]
    assert (now.min_replicas, now.max_replicas) == expected


def test_a_pool_without_prefill_nodes_has_no_ratio() -> None:
    policy = bounded((0, 0), (1, 9), ratio_min=0.5, ratio_max=2.0)
    decision = decide(observed_pool(0, 2, 10.0), policy)
    assert (decision.prefill, decision.decode) == (0, 1)
