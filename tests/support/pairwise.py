"""Which cases of a product of parameters run in `make test`; the others are marked `long`.

A test with several `parametrize` marks, and `@pytest.mark.pairwise` above them, runs in `make test`
with so many of its cases that every two values of different parameters still meet in one of them.
`make test-long` runs the rest of the product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest

Case = Mapping[str, int]  # parameter -> a number for its value
Pair = tuple[tuple[str, int], tuple[str, int]]


def mark_the_rest_long(items: Sequence[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for group in groups.values():
        # By identity: all cases hold the values of the same lists. pytest's `indices` of a
        # parameter that is no fixture's is the case's number.
        params = [item.callspec.params for item in group]
        chosen = covering([{name: id(value) for name, value in each.items()} for each in params])
        for number, item in enumerate(group):
            if number not in chosen:
                item.add_marker(pytest.mark.long)


def covering(cases: Sequence[Case]) -> set[int]:
    """Numbers of cases that hold every pair of values that any case holds; greedily, so few. All,
    where there are no pairs."""
    pairs = [_pairs(case) for case in cases]
    left = set().union(*pairs)
    if not left:
        return set(range(len(cases)))
    chosen: set[int] = set()
    while left:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen


def _pairs(case: Case) -> set[Pair]:
    return set(combinations(sorted(case.items()), 2))
