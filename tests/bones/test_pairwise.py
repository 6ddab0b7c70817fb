"""Products of parameters: `make test` runs enough of them that every two values meet."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairwise import covering

AXES = [(2, 2), (3, 4), (2, 3, 5), (4, 4, 4, 4), (2,) * 8]


@pytest.mark.parametrize("sizes", AXES, ids=str)
def test_every_two_values_meet_in_a_chosen_case(sizes: tuple[int, ...]) -> None:
    cases = [dict(zip("abcdefgh", case, strict=False)) for case in product(*map(range, sizes))]
    chosen = covering(cases)
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(chosen) <= max(2 * largest * second, 8)
    for one, other in combinations(cases[0], 2):
        met = {(cases[number][one], cases[number][other]) for number in chosen}
        assert met == {(case[one], case[other]) for case in cases}


def test_all_cases_of_a_single_parameter_are_chosen() -> None:
    assert covering([{"a": 0}, {"a": 1}, {"a": 2}]) == {0, 1, 2}
