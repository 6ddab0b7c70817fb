"""The best numbers of both roles within bounds, ratio and budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_operator.autoscaling.planner.replica_pair import (
    NO_REPLICAS,
    Replicas,
    SharedLimits,
    choose_pair,
)

COUNTS = st.integers(0, 6)
PAIRS = st.builds(Replicas, COUNTS, COUNTS)
ONE_GPU_EACH = SharedLimits(gpus=Replicas(1, 1))
examples = settings(max_examples=400)


@pytest.mark.parametrize(
    ("wanted", "limits", "expected"),
    [
        ((4, 4), {}, (4, 4)),
        ((1, 6), {"ratio_min": 0.5}, (3, 6)),
        ((6, 1), {"ratio_max": 2.0}, (6, 3)),
        ((9, 2), {"ratio_max": 1.0}, (6, 6)),  # decode saturates at 6: prefill is lowered
        ((2, 6), {"ratio_min": 2.0}, (8, 4)),  # prefill saturates at 8: decode is lowered
        ((6, 6), {"budget": 6}, (3, 3)),
        ((8, 4), {"budget": 6}, (4, 2)),
        ((4, 4), {"budget": 8, "existing": Replicas(6, 2)}, (4, 2)),  # shrink first
        (
            (4, 4),
            {"budget": 8, "existing": Replicas(4, 2), "draining": Replicas(2, 0)},
            (4, 2),
        ),
        (
            (4, 4),
            {"budget": 8, "existing": Replicas(4, 2), "draining": Replicas(1, 0)},
            (4, 3),
        ),
        ((4, 4), {"budget": 8, "existing": Replicas(4, 2)}, (4, 4)),
        ((8, 1), {"budget": 4, "ratio_max": 2.0}, (2, 1)),
        ((4, 4), {"budget": 1}, None),
        ((1, 1), {"ratio_min": 9.0}, None),
    ],
)
def test_the_best_pair_obeys_ratio_and_budget(
    wanted: tuple[int, int], limits: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    pair = choose_pair(
        Replicas(*wanted), Replicas(1, 1), Replicas(8, 6), replace(ONE_GPU_EACH, **limits)
    )
    assert pair == expected


@examples
@given(PAIRS, PAIRS, PAIRS, PAIRS, st.integers(0, 16), PAIRS)
def test_no_nodes_need_no_gpus(
    wanted: Replicas,
    highest: Replicas,
    existing: Replicas,
    draining: Replicas,
    budget: int,
    gpus: Replicas,
) -> None:
    """So the last fall-back of a step always has a pair."""
    limits = SharedLimits(gpus=gpus, budget=budget, existing=existing, draining=draining)
    assert choose_pair(wanted, NO_REPLICAS, highest, limits) is not None


@settings(max_examples=2_000)
@given(
    st.tuples(PAIRS, PAIRS, PAIRS, PAIRS, PAIRS, PAIRS),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(0, 3),
    st.integers(0, 16),
)
def test_ratio_and_growth_give_way_to_the_budget_in_one_fallback(
    pairs: tuple[Replicas, ...], gpus: tuple[int, int], rate: int, budget: int
) -> None:
    """A fall-back that drops the ratio and one that also drops the growth to the minima cannot
    differ. It is tried where the budget has no room for the lowest pair within the rates; a pair
    that keeps the minima is then also the best of those that need not."""
    current, minimum, more, surplus, draining, wanted_more = pairs
    maximum = Replicas(minimum.prefill + more.prefill, minimum.decode + more.decode)
    wanted = Replicas(
        min(maximum.prefill, minimum.prefill + wanted_more.prefill),
        min(maximum.decode, minimum.decode + wanted_more.decode),
    )
    limits = SharedLimits(
        gpus=Replicas(*gpus),
        budget=budget,
        existing=Replicas(current.prefill + surplus.prefill, current.decode + surplus.decode),
        draining=draining,
    )
    lowest = Replicas(
        max(minimum.prefill, min(maximum.prefill, current.prefill - rate)),
        max(minimum.decode, min(maximum.decode, current.decode - rate)),
    )
    no_growth = Replicas(min(current.prefill, minimum.prefill), min(current.decode, minimum.decode))
    if choose_pair(wanted, lowest, maximum, limits) is not None:
        return  # an earlier step has a pair
    if limits.gpus_of(wanted) > budget:
        return  # the target of all steps is within the budget, or the minima are not
    without_ratio = choose_pair(wanted, minimum, maximum, limits)
    without_growth = choose_pair(wanted, no_growth, maximum, limits)
    assert without_ratio in (None, without_growth)
