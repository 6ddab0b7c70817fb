"""What other packages add to the engine: entry points of the packages on the path.

In: a group. Out: its entry points. A search reads the entry points of all installed packages, which
takes 4 to 10 ms, and starting an engine asks several times; so a process searches a path once.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points


def installed_points(group: str) -> tuple[EntryPoint, ...]:
    return _found(group, tuple(sys.path))


@lru_cache
def _found(group: str, _path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The search looks at sys.path itself; as an argument it says when to search again."""
    return tuple(entry_points(group=group))
