"""Changes of one field of a JSON object: removed, of another type, negative, huge."""

from __future__ import annotations

import math
from typing import Any

REMOVED = object()
# Of each type of JSON, also those that only Python's parser accepts. The integer after 0 is the
# largest that is read; with it a model has too many weights for any machine.
VALUES: tuple[Any, ...] = (
    *(REMOVED, None, True, False, -1, 0, 2**31 - 1, 10**12, 10**400, 0.5, -0.5, 1e-300, 1e308),
    *(math.nan, math.inf, "", "other\nline", [], ["other"], [None], [1, 2], {}, {"other": 1}),
)
Json = dict[str, Any]
Field = tuple[str, ...]


def others(value: Any) -> tuple[Any, ...]:
    """Other values of the same type, which may be valid, and a float for an integer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ()
    return (2 * value, value + 1, float(value))


def changed(config: Json, field: Field, value: Any) -> Json:
    *path, last = field
    copy = inner = {**config}
    for key in path:
        inner[key] = inner = {**inner[key]}
    if value is REMOVED:
        del inner[last]
    else:
        inner[last] = value
    return copy
