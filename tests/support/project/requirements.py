"""What requirements bring, by the metadata of what is installed here; no registry is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

# A package's canonical name, and one of its extras or "": lines as metadata has them.
NeedsOf = Callable[[str, str], Iterable[str]]


def canonical(name: str) -> str:
    """As package registries compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_needs(name: str, extra: str) -> list[str]:
    """Of all extras: markers say which. None of a package that is missing: it is for another Python
    or platform than this one."""
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def closure(
    asked: Iterable[str],
    needs_of: NeedsOf = installed_needs,
    environment: Mapping[str, str] | None = None,
) -> set[str]:
    """The canonical names of all packages that these requirements bring, themselves included.

    `environment` is what markers are about, where it is not this machine."""
    waiting = [Requirement(one) for one in asked]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonical(wanted.name)
        for extra in {"", *wanted.extras} - {extra for one, extra in seen if one == name}:
            seen.add((name, extra))
            where = {**(environment or {}), "extra": extra}
            needed = [Requirement(line) for line in needs_of(name, extra)]
            waiting += [one for one in needed if one.marker is None or one.marker.evaluate(where)]
    return {name for name, _ in seen}
