"""Chooses the parameter combinations that run in `make test`, and marks the others `long`.

For a test with several `parametrize` marks below `@pytest.mark.pairwise`, `make test` runs enough
cases that every two values of different parameters occur together in one of them. `make test-long`
runs the rest of the product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest

Case = Mapping[str, int]  # parameter -> a number that identifies its value
Pair = tuple[tuple[str, int], tuple[str, int]]


def mark_the_rest_long(items: Sequence[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for group in groups.values():
        # Values are compared by identity: all cases take them from the same lists. pytest's
        # `indices` do not help: for a parameter without a fixture they hold the case's number.
        params = [item.callspec.params for item in group]
        chosen = covering([{name: id(value) for name, value in each.items()} for each in params])
        for number, item in enumerate(group):
            if number not in chosen:
                item.add_marker(pytest.mark.long)


def covering(cases: Sequence[Case]) -> set[int]:
    """Return the indices of few cases (chosen greedily) that together contain every pair of values
    that any case contains. Return all indices if there are no pairs."""
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
