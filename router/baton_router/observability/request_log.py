"""What became of one HTTP request: gathered by its handler, told by the middleware.

In: the tenant, the answer once it is placed, or the error that came instead. Out: the placement
header, and one log line per generation request. Of what a client wrote, the line holds only the
`x-request-id` that it gave the request; all else are numbers and names of ours.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton_protocol.errors import ErrorRecord
from baton_protocol.traces import Place
from baton_router.auth import Tenant
from baton_router.openai.answers import Usage
from baton_router.requests.in_flight import InFlightRequest

PLACEMENTS_SHOWN = 16
# A client's x-request-id that is repeated to it, and in the log: printable ASCII.
CLIENT_ID = re.compile(r"[ -~]{1,128}")
# Of what nodes tell about prompts: how much was found, and what fetching it was weighed against.
FOUND = ("matched_tokens", "fetched_tokens", "declined_tokens")
WEIGHED = ("fetch_predicted_ms", "compute_predicted_ms")

logger = logging.getLogger(__name__)


class Answering(Protocol):
    """A call that has a place, as far as it is."""

    @property
    def in_flight(self) -> Sequence[InFlightRequest]:
        """Those of its prompts that run or ran."""

    @property
    def ttft_s(self) -> float | None:
        """From the call's start to its first token, if there was one."""

    def usage(self) -> Usage:
        """Tokens so far."""


@dataclass(slots=True)
class RequestLog:
    """`id` is the router's own; `client_id` is the client's `x-request-id`, "" without one.
    `started` is the handler's clock, `came` the same in Unix seconds; `endpoint` is "" where
    nothing is generated; `trace` is its place in a trace, if it is in one. `tenant` is known before
    a handler runs that needs it. `waits`: why the call is not even prepared. `failure` is the error
    that the client was told, also one in a stream whose status was sent already."""

    id: str
    started: float
    endpoint: str = ""
    client_id: str = ""
    came: float = field(default_factory=time.time)
    trace: Place | None = None
    tenant: Tenant | None = None
    waits: str = ""
    answer: Answering | None = None
    failure: ErrorRecord | None = None

    @property
    def shown_id(self) -> str:
        """The value of x-request-id."""
        return self.client_id or self.id

    @property
    def tenant_name(self) -> str:
        return self.tenant.name if self.tenant is not None else ""

    @property
    def traceparent(self) -> str:
        """What nodes are told of its trace."""
        return self.trace.traceparent if self.trace is not None else ""

    def unix_ns(self, at: float) -> int:
        """Unix nanoseconds of a time by the handler's clock."""
        return round((self.came + at - self.started) * 1e9)

    def placement(self) -> str | None:
        """The value of x-baton-placement, as things stand."""
        if self.answer is not None:
            return _placements(self.answer.in_flight)
        if self.failure is not None:
            return refused(self.failure)
        return f"prefill=- decode=- reason=waiting: {self.waits}" if self.waits else None

    def fail(self, error: ErrorRecord) -> None:
        self.failure = error

    def log(self, status: int, now: float) -> None:
        """`status` is that of the failure, where a stream that began with 200 had one."""
        if not logger.isEnabledFor(logging.INFO):
            return
        prompt, completion, attempts, ttft_ms = 0, 0, 0, None
        if self.answer is not None:
            usage, ttft_s = self.answer.usage(), self.answer.ttft_s
            prompt, completion = usage.prompt_tokens, usage.completion_tokens
            attempts = max(request.record.attempt for request in self.answer.in_flight)
            ttft_ms = None if ttft_s is None else round(ttft_s * 1000, 1)
        total_ms = round((now - self.started) * 1000, 1)
        logger.info(
            "%s %d: %d prompt and %d completion tokens, attempts %d, %.0f ms",
            *(self.endpoint, status, prompt, completion, attempts, total_ms),
            extra={
                "request": self.id,
                "client_request": self.client_id or None,
                "endpoint": self.endpoint,
                "tenant": self.tenant_name,
                "status": status,
                "error": None if self.failure is None else self.failure.code,
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                **_prompts(self.answer.in_flight if self.answer is not None else ()),
                "attempts": attempts,
                "ttft_ms": ttft_ms,
                "total_ms": total_ms,
            },
        )


def client_id(said: str | None) -> str:
    """What a client said in `x-request-id`, or "" where that is nothing to be repeated."""
    return said if said is not None and CLIENT_ID.fullmatch(said) else ""


def refused(error: ErrorRecord) -> str:
    """The value of x-baton-placement of a request that never got a place."""
    return f"prefill=- decode=- reason=refused: {error.code}"


def _prompts(in_flight: Sequence[InFlightRequest]) -> dict[str, float]:
    """How their last nodes came to their prompts' KV, all prompts of a call together."""
    told = [request.record.stats for request in in_flight if request.record.stats is not None]
    found = {name: sum(getattr(stats, name) for stats in told) for name in FOUND}
    weighed = {name: round(sum(getattr(stats, name) for stats in told), 1) for name in WEIGHED}
    return found | weighed


def _placements(in_flight: Sequence[InFlightRequest]) -> str:
    """Of a call with many prompts the first few. Clients refuse headers of more than 8 KiB."""
    told = [request.line() for request in in_flight[:PLACEMENTS_SHOWN]]
    more = len(in_flight) - len(told)
    return "; ".join([*told, f"and {more} more"] if more else told)
