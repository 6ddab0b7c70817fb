"""Traces across processes: where a request stands in one, and the spans that a process tells.

In: the traceparent that a client or the router sent (W3C Trace Context). Out: the one to send on,
and spans, made when what they are about is over: nothing is done for them meanwhile. Who sends
spans to a collector is not our business: a Sink takes them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Place:
    """A span's place in its trace, in hex digits; `parent_id` "" begins one."""

    trace_id: str
    span_id: str
    parent_id: str = ""

    @property
    def traceparent(self) -> str:
        """For whoever works for this span."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED:02x}"


@dataclass(frozen=True, slots=True)
class Span:
    """Times are Unix nanoseconds. `served`: somebody else asked for it, from another process.
    `error` is a code of ours, "" for none."""

    name: str
    place: Place
    start_ns: int
    end_ns: int
    served: bool = False
    error: str = ""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


Sink = Callable[[Span], None]


def begin(traceparent: str) -> Place | None:
    """A span below this parent, or the first of a new trace where there is none that is valid.
    None where the parent's trace is not recorded."""
    parent = _parse(traceparent)
    if parent is None:
        return Place(secrets.token_hex(16), secrets.token_hex(8))
    trace_id, span_id, sampled = parent
    return Place(trace_id, secrets.token_hex(8), span_id) if sampled else None


def below(place: Place) -> Place:
    return Place(place.trace_id, secrets.token_hex(8), place.span_id)


def _parse(traceparent: str) -> tuple[str, str, bool] | None:
    """A later version may have more at its end; version ff and ids of zeros are invalid."""
    found = _PARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    wrong = version == "ff" or (version == "00" and more) or not int(trace_id, 16)
    if wrong or not int(span_id, 16):
        return None
    return trace_id, span_id, bool(int(flags, 16) & _SAMPLED)
