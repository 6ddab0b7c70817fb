"""Distributed traces: a request's place in a trace, and the spans that a process records.

It reads the traceparent from a client or the router (W3C Trace Context) and makes the one to pass
on. A Span is created when its operation has ended, so a running operation costs nothing. A Sink
receives the spans and sends them to a collector.
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
    """The ids of a span in its trace, in hex digits. `parent_id` is "" for a root span."""

    trace_id: str
    span_id: str
    parent_id: str = ""

    @property
    def traceparent(self) -> str:
        """The traceparent to send with requests made on behalf of this span."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED:02x}"


@dataclass(frozen=True, slots=True)
class Span:
    """One finished operation. Times are Unix nanoseconds. `served` is True for a request that came
    from another process (a server span). `error` is an error code of Baton, "" for none."""

    name: str
    place: Place
    start_ns: int
    end_ns: int
    served: bool = False
    error: str = ""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


Sink = Callable[[Span], None]


def begin(traceparent: str) -> Place | None:
    """Return a child of this parent, or the root of a new trace if `traceparent` is not valid.
    None if the parent's trace is not sampled."""
    parent = _parse(traceparent)
    if parent is None:
        return Place(secrets.token_hex(16), secrets.token_hex(8))
    trace_id, span_id, sampled = parent
    return Place(trace_id, secrets.token_hex(8), span_id) if sampled else None


def below(place: Place) -> Place:
    """Return the place of a new child span."""
    return Place(place.trace_id, secrets.token_hex(8), place.span_id)


def _parse(traceparent: str) -> tuple[str, str, bool] | None:
    """Return trace id, span id and the sampled flag; None if invalid. Versions after 00 may have
    more fields at the end; version ff and all-zero ids are invalid."""
    match = _PARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    invalid = version == "ff" or (version == "00" and more) or not int(trace_id, 16)
    if invalid or not int(span_id, 16):
        return None
    return trace_id, span_id, bool(int(flags, 16) & _SAMPLED)
