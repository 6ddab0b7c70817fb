"""Resolves requirements by the metadata of installed packages, without a package registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

# Takes a package's canonical name, and one of its extras or ""; gives Requires-Dist lines.
NeedsOf = Callable[[str, str], Iterable[str]]


def canonical(name: str) -> str:
    """Return the name as package registries compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_needs(name: str, extra: str) -> list[str]:
    """Return the requirements of all extras; their markers name the extra. Return [] for a package
    that is not installed, because it is for another Python or platform."""
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def closure(
    requirements: Iterable[str],
    needs_of: NeedsOf = installed_needs,
    environment: Mapping[str, str] | None = None,
) -> set[str]:
    """Return the canonical names of the required packages and of all that they require.

    `environment` replaces values of this machine's marker environment."""
    waiting = [Requirement(each) for each in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        for extra in {"", *requirement.extras} - {extra for each, extra in seen if each == name}:
            seen.add((name, extra))
            marker_environment = {**(environment or {}), "extra": extra}
            needed = [Requirement(line) for line in needs_of(name, extra)]
            waiting += [
                each
                for each in needed
                if each.marker is None or each.marker.evaluate(marker_environment)
            ]
    return {name for name, _ in seen}
