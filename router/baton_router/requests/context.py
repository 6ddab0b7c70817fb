"""The context of one HTTP request, from its headers to its log line.

In: the ids, the tenant, and what the handler reports: why the call waits, its requests, its error.
Out: the values of the headers with ids, placement and exactness. Log line, traces and explanations
read the context when the call ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_protocol.errors import ErrorRecord
from baton_protocol.store import Exact, exact_together
from baton_protocol.traces import Place
from baton_router.auth import Tenant
from baton_router.openai.answers import Usage
from baton_router.openai.dialect import Dialect
from baton_router.requests.in_flight import InFlightRequest

PLACEMENTS_SHOWN = 16
# A valid x-request-id, repeated in answer and log: printable ASCII.
CLIENT_ID = re.compile(r"[ -~]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """What is known of one HTTP request.

    `id` is the router's own id, `client_id` the client's `x-request-id` ("" without one). `started`
    is a time of the handler's clock, `came` the same in Unix seconds. `dialect` is None for a route
    that generates nothing. `trace` is its position in a trace, if traced. `tenant` is set before
    any handler that needs it. `waits` says why the call is still held. `failure` is the error that
    the client got, possibly inside a stream whose status was already sent.

    A call in the `background` has no client that waits: it starts only where the pool has room to
    spare, and after all others.

    `in_flight` holds the requests of the call's prompts that run or ran; it is empty until the
    first one is placed. `generates` is False for a call that only asks about its prompts. `ttft_s`
    are the seconds from `started` to the first token; None before that."""

    id: str
    started: float
    dialect: Dialect | None = None
    client_id: str = ""
    came: float = field(default_factory=time.time)
    trace: Place | None = None
    tenant: Tenant | None = None
    background: bool = False
    waits: str = ""
    in_flight: Sequence[InFlightRequest] = ()
    generates: bool = True
    ttft_s: float | None = None
    failure: ErrorRecord | None = None

    @property
    def endpoint(self) -> str:
        """The name of the route in metrics, logs and explanations; "" if it generates nothing."""
        return self.dialect.endpoint if self.dialect is not None else ""

    @property
    def operation(self) -> str:
        """OpenTelemetry's name of what the route does."""
        return self.dialect.operation if self.dialect is not None else ""

    @property
    def shown_id(self) -> str:
        """The value of the `x-request-id` header."""
        return self.client_id or self.id

    @property
    def tenant_name(self) -> str:
        return self.tenant.name if self.tenant is not None else ""

    @property
    def model(self) -> str:
        """The name of its model; "" if it was never placed."""
        return self.in_flight[0].prepared.serving.name if self.in_flight else ""

    @property
    def traceparent(self) -> str:
        """The traceparent for the nodes; "" if the call is not traced."""
        return self.trace.traceparent if self.trace is not None else ""

    @property
    def attempts(self) -> int:
        """The highest number of placements that one of the prompts needed."""
        return max((request.record.attempt for request in self.in_flight), default=0)

    def usage(self) -> Usage:
        """Usage so far; at the end, of the whole call."""
        records = [request.record for request in self.in_flight]
        generated = sum(len(ids) for record in records for ids in record.outputs)
        return Usage.of(
            prompt=sum(len(record.request.prompt_ids) for record in records),
            completion=generated if self.generates else 0,
            cached=sum(record.cached_tokens for record in records),
        )

    def unix_ns(self, at: float) -> int:
        """A time of the handler's clock in Unix nanoseconds."""
        return round((self.came + at - self.started) * 1e9)

    def placement_header(self) -> str | None:
        """The current value of the `x-baton-placement` header; None if there is none yet."""
        if self.in_flight:
            return _placements_line(self.in_flight)
        if self.failure is not None:
            return refusal_line(self.failure)
        return f"prefill=- decode=- reason=waiting: {self.waits}" if self.waits else None

    def exact(self) -> Exact | None:
        """The current value of the `x-baton-exact` header: how exact the nodes of all prompts are
        together. None while a prompt has had no node."""
        exacts = [request.record.exact for request in self.in_flight]
        placed_exacts = [exact for exact in exacts if exact is not None]
        if not exacts or len(placed_exacts) < len(exacts):
            return None
        return exact_together(placed_exacts)


def valid_client_id(header: str | None) -> str:
    """The client's `x-request-id`, or "" if it is missing or not valid."""
    return header if header is not None and CLIENT_ID.fullmatch(header) else ""


def refusal_line(error: ErrorRecord) -> str:
    """The `x-baton-placement` header of a request that never got a place."""
    return f"prefill=- decode=- reason=refused: {error.code}"


def _placements_line(in_flight: Sequence[InFlightRequest]) -> str:
    """The placements of a call's first prompts, because clients refuse headers above 8 KiB."""
    lines = [request.placement_line() for request in in_flight[:PLACEMENTS_SHOWN]]
    more = len(in_flight) - len(lines)
    return "; ".join([*lines, f"and {more} more"] if more else lines)
