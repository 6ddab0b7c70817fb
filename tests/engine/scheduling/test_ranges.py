"""Runs [start, end) of KV: merge, cut, count and validate."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.scheduling.ranges import Run, check_runs, merged, total, within


@st.composite
def drawn_runs(draw: st.DrawFn) -> list[Run]:
    """Runs ordered by start, which may touch and overlap."""
    starts = sorted(draw(st.lists(st.integers(0, 20), max_size=6)))
    return [(start, start + draw(st.integers(0, 5))) for start in starts]


def members(runs: list[Run]) -> set[int]:
    return {each for start, end in runs for each in range(start, end)}


@given(drawn_runs())
def test_merged_runs_have_the_same_members_and_do_not_touch(runs: list[Run]) -> None:
    actual = merged(runs)
    assert members(actual) == members(runs)
    assert total(actual) == len(members(runs))
    assert all(end < start for (_, end), (start, _) in pairwise(actual))


@given(drawn_runs(), st.integers(0, 30), st.integers(0, 30))
def test_within_gives_the_members_inside_the_bounds(runs: list[Run], low: int, high: int) -> None:
    actual = within(merged(runs), low, high)
    assert members(actual) == members(runs) & set(range(low, high))
    assert all(start < end for start, end in actual)


@pytest.mark.parametrize("runs", [[], [(0, 1)], [(0, 2), (2, 3)], [(1, 3), (5, 9)]])
def test_ascending_runs_within_the_blocks_are_valid(runs: list[Run]) -> None:
    check_runs(runs, 9)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(2, 2)], r"\[2, 2\)"),
        ([(-1, 2)], r"\[-1, 2\)"),
        ([(0, 10)], r"\[0, 10\)"),
        ([(0, 3), (2, 4)], r"\[2, 4\) is not a run of the 9 full ones behind block 3"),
        ([(4, 5), (0, 1)], r"\[0, 1\)"),
    ],
)
def test_the_error_for_an_invalid_run_names_it(runs: list[Run], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_runs(runs, 9)
