"""Finds containers that grow in a long-running part of Baton, by walking its object graph.

In: an object, before and after a period of uniform work. Out: the containers that hold more items
than before, by attribute path; and the paths of floats that became NaN.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

OURS = ("baton_", "prometheus_client.")
YEAR_S = 365 * 86_400.0
WEEK_S = 7 * 86_400.0
HOUR_S = 3600.0
_PLAIN = (str, bytes, bytearray, memoryview, int, float, complex, type(None), type)


def sizes(root: object) -> Counter[str]:
    """Return how many items the containers below `root` hold, summed per path: "view.nodes[]"
    stands for every value of the mapping `nodes` of `view`. Objects of other packages are not
    entered."""
    counts: Counter[str] = Counter()
    for path, value in _walk(root):
        if isinstance(value, Mapping | Set | Sequence | deque) and not isinstance(value, _PLAIN):
            counts[path] += len(value)
    return counts


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the paths that hold clearly more items, with both counts. Growth within 10 % plus 8
    items is ignored as fluctuation."""
    return {
        path: (before.get(path, 0), size)
        for path, size in after.items()
        if size > 1.1 * before.get(path, 0) + 8
    }


def nan_paths(root: object) -> list[str]:
    """Return the paths of NaN values, which come from an overflow or a division of 0 by 0."""
    return [path for path, value in _walk(root) if isinstance(value, float) and math.isnan(value)]


def _walk(root: object) -> Iterator[tuple[str, object]]:
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while left:
        path, value = left.pop()
        yield path, value
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            left += [(f"{path}[]", each) for each in list(value.values())]
        elif isinstance(value, Set | Sequence | deque):
            left += [(f"{path}[]", each) for each in list(value)]
        elif type(value).__module__.startswith(OURS):
            for name, each in _attributes(value):  # a linked chain is one path
                left.append((path if path.endswith(f".{name}") else f"{path}.{name}", each))


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for cls in type(value).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
