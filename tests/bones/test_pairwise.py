"""Pairwise testing: `make test` runs enough cases of a product to cover every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairwise import covering, mark_the_rest_long

AXES = [(2, 2), (3, 4), (2, 3, 5), (4, 4, 4, 4), (2,) * 8]


@pytest.mark.parametrize("sizes", AXES, ids=str)
def test_every_pair_of_values_is_in_a_chosen_case(sizes: tuple[int, ...]) -> None:
    cases = [dict(zip("abcdefgh", case, strict=False)) for case in product(*map(range, sizes))]
    chosen = covering(cases)
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(chosen) <= max(2 * largest * second, 8)
    for one, other in combinations(cases[0], 2):
        covered = {(cases[number][one], cases[number][other]) for number in chosen}
        assert covered == {(case[one], case[other]) for case in cases}


def test_every_case_of_a_single_parameter_is_chosen() -> None:
    assert covering([{"a": 0}, {"a": 1}, {"a": 2}]) == {0, 1, 2}


@pytest.fixture(params=[True, False])
def flag(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.pairwise
@pytest.mark.parametrize("letter", ["a", "b", "c"])
@pytest.mark.parametrize(("number", "same"), [(1, 1), (2, 2), (3, 3)])
def test_a_product_of_parameters(letter: str, number: int, same: int, flag: bool) -> None:
    assert number == same


def test_cases_of_a_marked_test_that_add_no_pair_are_long(
    request: pytest.FixtureRequest,
) -> None:
    module = request.node.getparent(pytest.Module)
    assert module is not None
    cases = [item for item in module.collect() if "test_a_product_of_parameters[" in item.nodeid]
    mark_the_rest_long([item for item in cases if isinstance(item, pytest.Item)])
    short = [item for item in cases if not item.get_closest_marker("long")]
    assert (len(cases), len(short)) == (18, 9)
