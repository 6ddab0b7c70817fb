"""The load of the pool in a header of an answer, for a load balancer that asks for it (ORCA).

In: a request's `endpoint-load-metrics-format`. Out: the answer's `endpoint-load-metrics`, as vLLM
writes it. Formats that vLLM does not know, such as BIN, are ignored, as in vLLM: a proxy asks for
them, and the client cannot change that.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = "endpoint-load-metrics"


def is_known_format(wanted: str) -> bool:
    return wanted.upper() in ("TEXT", "JSON")


def load_text(wanted: str, load: Mapping[str, float]) -> str:
    """The header's value in a known format. `load` holds numbers by name."""
    if wanted.upper() == "JSON":
        return f"JSON {msgspec.json.encode({'named_metrics': load}).decode()}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
