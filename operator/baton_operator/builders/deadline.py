"""For how long a request may go on: as the routers are told.

In: the flags that a user adds for routers. Out: seconds. The pool has no field of its own for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

REQUEST_S = 600  # a router's own default
_FLAG = "--request-timeout="


def longest_request_s(flags: Sequence[str]) -> int:
    """The last one counts, as for the router; one that is no number lets no router start."""
    told = [flag.removeprefix(_FLAG) for flag in flags if flag.startswith(_FLAG)]
    try:
        seconds = float(told[-1]) if told else float(REQUEST_S)
    except ValueError:
        return REQUEST_S
    return math.ceil(seconds) if math.isfinite(seconds) and seconds > 0 else REQUEST_S
