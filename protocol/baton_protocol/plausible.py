"""Whether a record that somebody else sent can be true: its figures and texts have bounds.

In: a record, decoded. Out: yes or no. The types were checked when it was decoded; what is left are
figures such as NaN, -1 and 1e300, from which nothing sensible can be computed, and texts and lists
so long that nobody writes them. The bounds are far beyond anything that is measured or counted.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

LARGEST = 2.0**53  # bytes, tokens, milliseconds; beyond it floats skip whole numbers
LONGEST_TEXT = 4096
MOST_ITEMS = 4096


def is_plausible(part: Any) -> bool:
    """Every number finite, not negative and at most LARGEST, every text and list short."""
    if part is None or isinstance(part, bool):
        return True
    if isinstance(part, int | float):
        return math.isfinite(part) and 0 <= part <= LARGEST
    if isinstance(part, str | bytes):
        return len(part) <= LONGEST_TEXT
    if isinstance(part, dict):
        return is_plausible([*part.keys(), *part.values()])
    if isinstance(part, list | tuple):
        return len(part) <= MOST_ITEMS and all(is_plausible(one) for one in part)
    return all(is_plausible(getattr(part, name)) for name in _fields(part))


def _fields(record: msgspec.Struct) -> tuple[str, ...]:
    return record.__struct_fields__
