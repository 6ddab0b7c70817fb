"""--goodput of `baton bench serve` and `baton bench sweep`; see `serve_metrics` for its values."""

from __future__ import annotations

from typing import Any

from baton_protocol.options import option


def goodput_option() -> Any:
    """The default of a field; each record needs one of its own."""
    return option(
        (),
        "limits that a good request meets, in ms: ttft, tpot (mean of its tokens), itl (each of its"
        " gaps), e2el",
        metavar="NAME:MS",
        several=True,
    )
