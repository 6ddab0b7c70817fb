"""Stretches of KV: merged, cut, counted; and what is no run."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.scheduling.ranges import Run, check_runs, merged, total, within


@st.composite
def drawn_runs(draw: st.DrawFn) -> list[Run]:
    """By start; they may touch and overlap."""
    starts = sorted(draw(st.lists(st.integers(0, 20), max_size=6)))
    return [(start, start + draw(st.integers(0, 5))) for start in starts]


def members(runs: list[Run]) -> set[int]:
    return {each for start, end in runs for each in range(start, end)}


@given(drawn_runs())
def test_merged_runs_hold_the_same_and_stand_apart(runs: list[Run]) -> None:
    found = merged(runs)
    assert members(found) == members(runs)
    assert total(found) == len(members(runs))
    assert all(end < start for (_, end), (start, _) in pairwise(found))


@given(drawn_runs(), st.integers(0, 30), st.integers(0, 30))
def test_what_is_within_bounds_is_what_both_hold(runs: list[Run], low: int, high: int) -> None:
    found = within(merged(runs), low, high)
    assert members(found) == members(runs) & set(range(low, high))
    assert all(start < end for start, end in found)


@pytest.mark.parametrize("runs", [[], [(0, 1)], [(0, 2), (2, 3)], [(1, 3), (5, 9)]])
def test_ascending_runs_within_the_blocks_are_runs(runs: list[Run]) -> None:
    check_runs(runs, 9)


@pytest.mark.parametrize(
    ("runs", "bad"),
    [
        ([(2, 2)], r"\[2, 2\)"),
        ([(-1, 2)], r"\[-1, 2\)"),
        ([(0, 10)], r"\[0, 10\)"),
        ([(0, 3), (2, 4)], r"\[2, 4\) is not a run of the 9 full ones behind block 3"),
        ([(4, 5), (0, 1)], r"\[0, 1\)"),
    ],
)
def test_what_is_no_run_of_the_blocks_is_named(runs: list[Run], bad: str) -> None:
    with pytest.raises(ValueError, match=bad):
        check_runs(runs, 9)
