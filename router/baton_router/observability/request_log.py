"""Records what became of one HTTP request. The handler fills the record, the middleware writes it.

In: the tenant, and the answer or the error. Out: the placement header, and one log line per
generation request. The line contains nothing a client wrote except its `x-request-id`; the rest are
the router's own numbers and names.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from baton_protocol.errors import ErrorRecord, NotFound
from baton_protocol.ids import NodeId
from baton_protocol.link import RequestStats
from baton_protocol.store import Exact, exact_together
from baton_protocol.traces import Attribute, Place, Sink, Span, begin, below
from baton_router.auth import Tenant
from baton_router.openai.answers import Usage
from baton_router.requests.in_flight import InFlightRequest
from baton_router.requests.state import Attempt, Wait

OPERATIONS = {"chat": "chat", "completions": "text_completion"}


class Tracing:
    """Makes the router's spans: one per call, and one child per placement.

    In: the client's traceparent when a call comes, and its record when it has ended. Out: spans for
    the sink, and the traceparent for the nodes. Spans hold the router's own numbers and names, and
    the client's `x-request-id`. Without a sink nothing is traced, and nodes get no traceparent.
    """

    def __init__(self, sink: Sink | None, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock

    def begin(self, traceparent: str) -> Place | None:
        """The call's position in a trace; None if tracing is off."""
        return begin(traceparent) if self._sink is not None else None

    def end(self, trail: RequestLog, status: int) -> None:
        if self._sink is None or trail.trace is None:
            return
        self._sink(_call_span(trail, trail.trace, status, self._clock()))
        for request in trail.answer.in_flight if trail.answer is not None else ():
            for span in _placement_spans(request, trail, trail.trace):
                self._sink(span)


def _call_span(trail: RequestLog, place: Place, status: int, now: float) -> Span:
    attributes: dict[str, Attribute] = {
        "baton.request": trail.id,
        "baton.tenant": trail.tenant_name,
        "gen_ai.operation.name": OPERATIONS[trail.endpoint],
        "http.response.status_code": status,
    }
    if trail.client_id:
        attributes["baton.client_request"] = trail.client_id
    if trail.answer is not None:
        usage, ttft_s = trail.answer.usage(), trail.answer.ttft_s
        request = trail.answer.in_flight[0]
        attributes |= {
            "baton.attempts": max(in_flight.record.attempt for in_flight in trail.answer.in_flight),
            "baton.cached_tokens": usage.cached_tokens,
            "gen_ai.response.model": request.prepared.serving.name,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }
        if request.record.attempts:
            attributes["baton.placement.reason"] = request.record.attempts[-1].placement.reason
        if ttft_s is not None:
            attributes["baton.first_token_ms"] = round(ttft_s * 1000, 3)
    return Span(
        trail.endpoint,
        place,
        trail.unix_ns(trail.started),
        trail.unix_ns(now),
        served=True,
        error=trail.failure.code if trail.failure is not None else "",
        attributes=attributes,
    )


def _placement_spans(request: InFlightRequest, trail: RequestLog, place: Place) -> Iterator[Span]:
    """One span per placement, from when the request needed a place to when it got one."""
    waiting_since = request.record.began
    for attempt in request.record.attempts:
        yield Span(
            "placement",
            below(place),
            trail.unix_ns(min(waiting_since, attempt.placed_at)),
            trail.unix_ns(attempt.placed_at),
            attributes=_placement_attributes(request, attempt),
        )
        waiting_since = attempt.placed_at if attempt.ended_at is None else attempt.ended_at


def _placement_attributes(request: InFlightRequest, attempt: Attempt) -> dict[str, Attribute]:
    placement = attempt.placement
    attributes: dict[str, Attribute] = {
        "baton.request": request.id,
        "baton.attempt": attempt.number,
        "baton.placement.reason": placement.reason,
        "baton.placement.decode": placement.decode,
        "baton.placement.prefill": placement.prefill or "",
        "baton.placement.predicted_ms": round(placement.predicted_ms, 3),
        "baton.placement.expected_ms": round(attempt.expected_ms, 3),
        "baton.placement.uncached_tokens": placement.uncached,
    }
    if attempt.decoding_at is not None:
        measured = attempt.decoding_at - attempt.placed_at
        attributes["baton.placement.measured_ms"] = round(measured * 1000, 3)
    return attributes


PLACEMENTS_SHOWN = 16
# A valid x-request-id, repeated in answer and log: printable ASCII.
CLIENT_ID = re.compile(r"[ -~]{1,128}")
# Node figures about prompts: tokens found, and the predicted costs of fetching and computing.
FOUND = ("matched_tokens", "fetched_tokens", "declined_tokens")
WEIGHED = ("fetch_predicted_ms", "compute_predicted_ms")

logger = logging.getLogger(__name__)


class Answering(Protocol):
    """A call that has been placed."""

    @property
    def in_flight(self) -> Sequence[InFlightRequest]:
        """The requests of the call that run or ran."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the start of the call to its first token; None before that."""

    def usage(self) -> Usage:
        """Tokens so far."""


@dataclass(slots=True)
class RequestLog:
    """The record of one HTTP request.

    `id` is the router's own id, `client_id` the client's `x-request-id` ("" without one). `started`
    is a time of the handler's clock, `came` the same in Unix seconds. `endpoint` is "" for a route
    that generates nothing. `trace` is its position in a trace, if traced. `tenant` is set before
    any handler that needs it. `waits` says why the call is still held. `failure` is the error that
    the client got, possibly inside a stream whose status was already sent."""

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
        """The value of the `x-request-id` header."""
        return self.client_id or self.id

    @property
    def tenant_name(self) -> str:
        return self.tenant.name if self.tenant is not None else ""

    @property
    def traceparent(self) -> str:
        """The traceparent for the nodes; "" if the call is not traced."""
        return self.trace.traceparent if self.trace is not None else ""

    def unix_ns(self, at: float) -> int:
        """A time of the handler's clock in Unix nanoseconds."""
        return round((self.came + at - self.started) * 1e9)

    def placement(self) -> str | None:
        """The current value of the `x-baton-placement` header; None if there is none yet."""
        if self.answer is not None:
            return _placements(self.answer.in_flight)
        if self.failure is not None:
            return refused(self.failure)
        return f"prefill=- decode=- reason=waiting: {self.waits}" if self.waits else None

    def exact(self) -> Exact | None:
        """The current value of the `x-baton-exact` header: how exact the nodes of all prompts are
        together. None while a prompt has had no node."""
        in_flight = self.answer.in_flight if self.answer is not None else ()
        known = [request.record.exact for request in in_flight if request.record.exact is not None]
        return exact_together(known) if known and len(known) == len(in_flight) else None

    def fail(self, error: ErrorRecord) -> None:
        self.failure = error

    def log(self, status: int, now: float) -> None:
        """Write the log line. `status` is the failure's if a stream failed after its 200."""
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
                **_prompt_figures(self.answer.in_flight if self.answer is not None else ()),
                "attempts": attempts,
                "ttft_ms": ttft_ms,
                "total_ms": total_ms,
            },
        )


def client_id(header: str | None) -> str:
    """The client's `x-request-id`, or "" if it is missing or not valid."""
    return header if header is not None and CLIENT_ID.fullmatch(header) else ""


def refused(error: ErrorRecord) -> str:
    """The `x-baton-placement` header of a request that never got a place."""
    return f"prefill=- decode=- reason=refused: {error.code}"


def _prompt_figures(in_flight: Sequence[InFlightRequest]) -> dict[str, float]:
    """Node figures about the prompts, summed over all prompts of a call."""
    reported = [request.record.stats for request in in_flight if request.record.stats is not None]
    token_sums = {name: sum(getattr(stats, name) for stats in reported) for name in FOUND}
    cost_sums = {
        name: round(sum(getattr(stats, name) for stats in reported), 1) for name in WEIGHED
    }
    return token_sums | cost_sums


def _placements(in_flight: Sequence[InFlightRequest]) -> str:
    """The placements of a call's first prompts, because clients refuse headers above 8 KiB."""
    lines = [request.line() for request in in_flight[:PLACEMENTS_SHOWN]]
    more = len(in_flight) - len(lines)
    return "; ".join([*lines, f"and {more} more"] if more else lines)


Json = dict[str, Any]

MAX_BYTES = 32 << 20
# OpenAI's id fields put one of these before the id of x-baton-request-id.
PREFIXES = ("chatcmpl-", "cmpl-")
SHOWN = 64  # characters of an unknown id in an error
# Prompts of a call that an explanation shows.
MAX_PROMPTS = 64


class Explanation(msgspec.Struct, kw_only=True):
    """What `openapi` documents of an explanation: docs/api.md says what each request has."""

    id: str
    state: str
    requests: list[dict[str, Any]]


class ExplanationHistory:
    """GET /requests/{id}: explanations of running calls, and of the last ones that ended.

    In: records as calls begin and end. Out: JSON with counts, names, times and reasons of the
    router and the client's `x-request-id`. It contains no text, no token ids and no error message,
    since those may repeat what a client wrote. Times are milliseconds; `at_ms` counts from the
    call's start.

    Ended calls are kept encoded, so that their size is known: at most `max_calls` calls (0: none)
    and `max_bytes`. A call without a tenant, such as one with a wrong key, is not kept, so nobody
    can push out what others may want to read.
    """

    def __init__(
        self, max_calls: int, clock: Callable[[], float], max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_calls = max_calls
        self._clock = clock
        self._max_bytes = max_bytes
        self._running: dict[str, RequestLog] = {}
        self._ended: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Number of ended calls that are kept."""
        return len(self._ended)

    @property
    def bytes(self) -> int:
        """Total size of the kept calls."""
        return self._bytes

    def begin(self, trail: RequestLog) -> None:
        self._running[trail.id] = trail

    def end(self, trail: RequestLog, status: int) -> None:
        """`status` is what the client saw, or would have seen."""
        self._running.pop(trail.id, None)
        if not self._max_calls or trail.tenant is None:
            return
        kept = encoded(explanation(trail, status, self._clock()))
        self._ended[trail.id] = (trail.tenant.name, kept)
        self._bytes += len(kept)
        while len(self._ended) > self._max_calls or self._bytes > self._max_bytes:
            _, (_, oldest) = self._ended.popitem(last=False)
            self._bytes -= len(oldest)

    def find(self, wanted: str, reader: Tenant) -> Json:
        """The explanation of a call, or of one of its requests. Raise NotFound, also for another
        tenant's call, so that ids do not leak."""
        request_id = wanted
        for prefix in PREFIXES:
            request_id = request_id.removeprefix(prefix)
        call_id, _, slot = request_id.partition("-")
        found = self._find_call(call_id, reader)
        if found is not None and slot:
            found = one_of(found, request_id)
        if found is None:
            raise NotFound(
                f"request {wanted[:SHOWN]!r} is unknown; this router knows its running requests "
                f"and the last {self._max_calls} that ended here; ask the router that served it",
                code="request_not_found",
            )
        return found

    def _find_call(self, call_id: str, reader: Tenant) -> Json | None:
        if (trail := self._running.get(call_id)) is not None:
            owner = trail.tenant.name if trail.tenant is not None else None
            allowed = reader.admin or reader.name == owner
            return explanation(trail, None, self._clock()) if allowed else None
        if (kept := self._ended.get(call_id)) is not None and (
            reader.admin or reader.name == kept[0]
        ):
            found: Json = msgspec.json.decode(kept[1])
            return found
        return None


def explanation(trail: RequestLog, status: int | None, now: float) -> Json:
    """The explanation of a call; `status` is None while it runs."""
    answer = trail.answer
    in_flight = answer.in_flight if answer is not None else ()
    usage = answer.usage() if answer is not None else None
    ttft_s = answer.ttft_s if answer is not None else None
    return {
        "id": trail.id,
        "client_request_id": trail.client_id or None,
        "endpoint": trail.endpoint,
        "tenant": trail.tenant_name,
        "model": in_flight[0].prepared.serving.name if in_flight else None,
        "came": round(trail.came, 3),
        "state": "running" if status is None else "ended",
        "status": status,
        "error": trail.failure.code if trail.failure is not None else None,
        "held": trail.waits or None,
        "prepared_ms": _since(trail.started, in_flight[0].record.began if in_flight else None),
        "first_token_ms": _ms(ttft_s),
        "total_ms": _since(trail.started, now),
        "prompt_tokens": usage.prompt_tokens if usage is not None else 0,
        "cached_tokens": usage.cached_tokens if usage is not None else 0,
        "completion_tokens": usage.completion_tokens if usage is not None else 0,
        "exact": trail.exact(),
        "requests": [_request(request, trail.started, now) for request in in_flight[:MAX_PROMPTS]],
        "requests_left_out": max(0, len(in_flight) - MAX_PROMPTS),
    }


def encoded(explanation: Json) -> bytes:
    """Encode as JSON. numpy numbers from predictions become floats."""
    return msgspec.json.encode(explanation, enc_hook=float)


def one_of(explanation: Json, request_id: str) -> Json | None:
    """The explanation with only one of its requests; None if it has no such request."""
    found = [request for request in explanation["requests"] if request["id"] == request_id]
    return explanation | {"requests": found} if found else None


def _request(request: InFlightRequest, started: float, now: float) -> Json:
    record = request.record
    return {
        "id": request.id,
        "state": record.end or record.phase,
        "prompt_tokens": len(record.request.prompt_ids),
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.tokens,
        "waits": _waits(record.waits, started, now),
        "attempts": [_attempt(attempt, started) for attempt in record.attempts],
        "attempts_left_out": record.left_out,
    }


def _waits(waits: Sequence[Wait], started: float, now: float) -> list[Json]:
    return [
        {
            "at_ms": _since(started, wait.since),
            "ms": _since(wait.since, now if wait.until is None else wait.until),
            "why": wait.why,
        }
        for wait in waits
    ]


def _attempt(attempt: Attempt, started: float) -> Json:
    placement, chosen = attempt.placement, attempt.chosen
    decoding_ms = _since(attempt.placed_at, attempt.decoding_at)
    return {
        "attempt": attempt.number,
        "at_ms": _since(started, attempt.placed_at),
        "prefill": placement.prefill,
        "decode": placement.decode,
        "reason": placement.reason,
        "explanation": placement.explanation,
        "uncached_tokens": placement.uncached,
        "known": {
            "store_up": attempt.basis.store_up,
            "chunks": attempt.basis.chunks,
            "stored_chunks": attempt.basis.stored_chunks,
            "cached_tokens": chosen.cached_tokens if chosen is not None else None,
        },
        "exact": attempt.basis.exact,
        "considered": placement.considered,
        "predicted_ms": round(placement.predicted_ms, 3),
        "expected_ms": round(attempt.expected_ms, 3),
        "first_token_ms": _since(attempt.placed_at, attempt.first_at),
        "decoding_ms": decoding_ms,
        "error_ms": None if decoding_ms is None else round(decoding_ms - attempt.expected_ms, 3),
        "fetch_or_compute": _fetching(attempt.measured[0][1]) if attempt.measured else None,
        "measured": [_stats(node, stats) for node, stats in attempt.measured],
        "prefill_given_up_at_ms": _since(started, attempt.prefill_given_up_at),
        "ended": None
        if attempt.ended is None
        else {
            "why": attempt.ended,
            "at_ms": _since(started, attempt.ended_at),
            "node": attempt.blamed,
        },
    }


def _stats(node: NodeId, stats: RequestStats) -> Json:
    return {"node": node, **msgspec.structs.asdict(stats)}


def _fetching(stats: RequestStats) -> Json:
    """Whether the node that had to have the prompt fetched or computed what the store held."""
    action = {
        (False, False): "nothing to fetch",
        (True, False): "fetched",
        (False, True): "computed",
        (True, True): "fetched some, computed some",
    }[stats.fetched_tokens > 0, stats.declined_tokens > 0]
    return {
        "did": action,
        "fetched_tokens": stats.fetched_tokens,
        "declined_tokens": stats.declined_tokens,
        "fetch_predicted_ms": stats.fetch_predicted_ms,
        "compute_predicted_ms": stats.compute_predicted_ms,
        "fetch_ms": stats.fetch_ms,
    }


def _since(then: float, at: float | None) -> float | None:
    return None if at is None else _ms(at - then)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
