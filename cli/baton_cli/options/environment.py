"""Selects Baton's variables from a process environment.

In: all variables. Out: the BATON_* variables, checked against the existing flags, and the
environment for child processes. Kubernetes sets several variables per service of a pod's namespace.
Those of a service called `baton` or `baton-router` start with BATON_ too; they are ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from baton_cli.errors import UsageError

PREFIX = "BATON_"
_LINK_SCHEMES = ("tcp://", "udp://", "sctp://")


def is_service_variable(name: str, value: str) -> bool:
    """Whether Kubernetes (or a Docker link) sets this variable for a service."""
    return (
        name.endswith("_SERVICE_HOST")
        or "_SERVICE_PORT" in name
        or "_PORT_" in name
        or (name.endswith("_PORT") and value.startswith(_LINK_SCHEMES))
    )


def own_variables(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the BATON_* variables that are set; raise UsageError for one that no flag reads.

    An empty value counts as unset: compose files and charts write empty values.
    """
    variables = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or is_service_variable(name, value):
            continue
        if name not in names:
            close = closest(name, names, PREFIX)
            hint = (
                f"did you mean {close}?" if close else "baton COMMAND --help lists the known ones"
            )
            raise UsageError(f"unknown variable {name}; {hint}")
        if value:
            variables[name] = value
    return variables


def for_children(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that children inherit: all but BATON_*. Children get flags instead."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def closest(name: str, names: Collection[str], prefix: str) -> str:
    """Return the one of `names` that is closest to `name`, or "" if none is close. All share
    `prefix`, which the comparison leaves out."""
    full_names = {other.removeprefix(prefix): other for other in sorted(names)}
    close = difflib.get_close_matches(name.removeprefix(prefix), full_names, n=1, cutoff=0.5)
    return full_names[close[0]] if close else ""
