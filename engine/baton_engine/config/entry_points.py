"""The entry points of installed packages, through which they add model families and processors.

In: the name of a group. Out: its entry points. Python reads a file of each installed package for
them, 5 to 10 ms, so a process looks once: it does not see what is installed while it runs.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoints, entry_points


@cache
def installed_points(group: str) -> EntryPoints:
    return entry_points(group=group)
