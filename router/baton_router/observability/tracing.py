"""The router's spans: one per call, and below it one per placement.

In: the client's traceparent as a call comes, its trail when it has ended. Out: spans for the sink,
and the traceparent that goes to the nodes. Numbers and names of ours, and the client's own
`x-request-id`. Without a sink nothing is traced, and nodes are told of no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton_protocol.traces import Attribute, Place, Sink, Span, begin, below
from baton_router.observability.request_log import RequestLog
from baton_router.requests.attempts import Attempt
from baton_router.requests.in_flight import InFlightRequest

OPERATIONS = {"chat": "chat", "completions": "text_completion"}


class Tracing:
    def __init__(self, sink: Sink | None, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock

    def begin(self, traceparent: str) -> Place | None:
        """The call's place in a trace; None where it is not traced."""
        return begin(traceparent) if self._sink is not None else None

    def end(self, trail: RequestLog, status: int) -> None:
        if self._sink is None or trail.trace is None:
            return
        self._sink(_call(trail, trail.trace, status, self._clock()))
        for request in trail.answer.in_flight if trail.answer is not None else ():
            for span in _placements(request, trail, trail.trace):
                self._sink(span)


def _call(trail: RequestLog, place: Place, status: int, now: float) -> Span:
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
            "baton.attempts": max(one.record.attempt for one in trail.answer.in_flight),
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


def _placements(request: InFlightRequest, trail: RequestLog, place: Place) -> Iterator[Span]:
    """Each from when the request wanted a place to when it had one."""
    wanted_at = request.record.began
    for attempt in request.record.attempts:
        yield Span(
            "placement",
            below(place),
            trail.unix_ns(min(wanted_at, attempt.placed_at)),
            trail.unix_ns(attempt.placed_at),
            attributes=_decided(request, attempt),
        )
        wanted_at = attempt.placed_at if attempt.ended_at is None else attempt.ended_at


def _decided(request: InFlightRequest, attempt: Attempt) -> dict[str, Attribute]:
    placement = attempt.placement
    told: dict[str, Attribute] = {
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
        told["baton.placement.measured_ms"] = round(measured * 1000, 3)
    return told
