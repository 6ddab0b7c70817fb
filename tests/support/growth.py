"""What grows in a part of Baton that runs for long, found by walking through its objects.

In: an object, before and after a stretch of the same work. Out: the containers that hold more than
before, by the attributes that lead to them; and floats that are no numbers any more.
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
    """How many items the containers below `root` hold, those at one path together: "view.nodes[]"
    is every value of the mapping `nodes` of `view`. Objects of others are not looked into."""
    found: Counter[str] = Counter()
    for path, value in _walk(root):
        if isinstance(value, Mapping | Set | Sequence | deque) and not isinstance(value, _PLAIN):
            found[path] += len(value)
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """What holds more: not by a few items, which may be there or not at any moment."""
    return {
        path: (before.get(path, 0), size)
        for path, size in after.items()
        if size > 1.1 * before.get(path, 0) + 8
    }


def broken_numbers(root: object) -> list[str]:
    """Where there is NaN: what became of an overflow, or of nothing divided by nothing."""
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
            for name, each in _attributes(value):  # along a chain it is one path
                left.append((path if path.endswith(f".{name}") else f"{path}.{name}", each))


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for cls in type(value).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
