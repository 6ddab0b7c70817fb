"""The only reader of the process environment, read once at start.

In: the variables as they are. Out: those that are ours (BATON_*), checked against the flags that
exist, and the environment for children. Kubernetes sets a handful of variables per service in each
pod's namespace; for services called `baton` or `baton-router` they begin like ours and are ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from baton_cli.errors import UsageError

PREFIX = "BATON_"
_LINK_SCHEMES = ("tcp://", "udp://", "sctp://")


def is_service_variable(name: str, value: str) -> bool:
    """Whether this is one of Kubernetes' (or Docker links') variables about a service."""
    return (
        name.endswith("_SERVICE_HOST")
        or "_SERVICE_PORT" in name
        or "_PORT_" in name
        or (name.endswith("_PORT") and value.startswith(_LINK_SCHEMES))
    )


def own_variables(environ: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """The BATON_* variables that are set; raise UsageError for one that no flag reads.

    An empty value counts as not set (compose files and charts write those).
    """
    found = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or is_service_variable(name, value):
            continue
        if name not in known:
            close = closest(name, known, PREFIX)
            hint = (
                f"did you mean {close}?" if close else "baton COMMAND --help lists the known ones"
            )
            raise UsageError(f"unknown variable {name}; {hint}")
        if value:
            found[name] = value
    return found


def for_children(environ: Mapping[str, str]) -> dict[str, str]:
    """What children inherit: everything but BATON_*; they are told by flags."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def closest(name: str, known: Collection[str], prefix: str) -> str:
    """The known name that `name` is probably meant to be, or "". All known names share `prefix`,
    which is not compared."""
    names = {one.removeprefix(prefix): one for one in sorted(known)}
    close = difflib.get_close_matches(name.removeprefix(prefix), names, n=1, cutoff=0.5)
    return names[close[0]] if close else ""
