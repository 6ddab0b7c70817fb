"""Runs [start, end) of KV: merge, cut, count and validate."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.scheduling.ranges import (
    Run,
    check_runs,
    merge_runs,
    reusable,
    spans_of,
    total,
    within,
)
from baton_protocol.layout import KVGroup
from tests.support.engines.demands import kv_layout


@st.composite
def drawn_runs(draw: st.DrawFn) -> list[Run]:
    """Runs ordered by start, which may touch and overlap."""
    starts = sorted(draw(st.lists(st.integers(0, 20), max_size=6)))
    return [(start, start + draw(st.integers(0, 5))) for start in starts]


def members(runs: list[Run]) -> set[int]:
    return {each for start, end in runs for each in range(start, end)}


@given(drawn_runs())
def test_merged_runs_have_the_same_members_and_do_not_touch(runs: list[Run]) -> None:
    actual = merge_runs(runs)
    assert members(actual) == members(runs)
    assert total(actual) == len(members(runs))
    assert all(end < start for (_, end), (start, _) in pairwise(actual))


@given(drawn_runs(), st.integers(0, 30), st.integers(0, 30))
def test_within_gives_the_members_inside_the_bounds(runs: list[Run], low: int, high: int) -> None:
    actual = within(merge_runs(runs), low, high)
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


@pytest.mark.parametrize(
    ("windowed", "first", "expected"),
    [
        # The token at 40 sees those from 31 on.
        ([(0, 10)], 40, [(0, 10)]),
        ([(7, 10)], 40, [(0, 10)]),
        # Span 7 is missing: token 28 sees those from 19 on, and nothing earlier is missing.
        ([(4, 7), (8, 10)], 40, [(0, 7), (8, 10)]),
        # Each computed span needs the two before it.
        ([(8, 10)], 40, [(8, 10)]),
        ([], 40, []),
        # The token at 39 is computed in span 9, which landed.
        ([(7, 10)], 39, [(0, 10)]),
        ([(8, 10)], 39, [(8, 10)]),
        ([(7, 9)], 36, [(7, 9)]),
        ([(6, 9)], 36, [(0, 9)]),
    ],
)
def test_a_span_without_windowed_kv_is_computed_if_a_computed_token_sees_it(
    windowed: list[Run], first: int, expected: list[Run]
) -> None:
    layout = kv_layout(block=4, groups=(KVGroup((0,)), KVGroup((1,), 10)))
    assert reusable([(0, 10)], windowed, first, layout) == expected


@given(
    drawn_runs(),
    drawn_runs(),
    st.integers(0, 80),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([1, 2, 5, 8, 30]),
)
def test_the_fewest_spans_are_computed_with_which_all_computed_tokens_see_kv(
    full: list[Run], windowed: list[Run], first: int, block: int, window: int
) -> None:
    layout = kv_layout(block=block, groups=(KVGroup((0,)), KVGroup((1,), window)))
    spans = set(range(-(-first // block)))
    reused = spans_of(reusable(full, windowed, first, layout))
    assert reused <= spans & members(full)

    def lacks(computed: set[int]) -> set[int]:
        """Spans whose KV is missing, if these spans and the tokens from `first` on are computed."""
        starts = [first, *(span * block for span in computed)]
        seen = {
            token // block for start in starts for token in range(layout.window_start(start), start)
        }
        if first % block:
            seen.add(first // block)  # a part of the span, which is cached when it is full
        return ((spans - members(full)) | (seen & spans - members(windowed))) - computed

    needed = set[int]()
    while lacks(needed):
        needed |= lacks(needed)
    assert spans - reused == needed
