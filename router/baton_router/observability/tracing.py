"""Makes a generation request's spans: one for the call, and one child per placement.

In: the client's traceparent when a call comes, and its context when it has ended. Out: spans for
the sink, and the traceparent for the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton_protocol.traces import Attribute, Place, Sink, Span, begin, below
from baton_router.requests.attempt import Attempt
from baton_router.requests.context import RequestContext
from baton_router.requests.in_flight import InFlightRequest


class Tracing:
    """Traces calls, if there is a sink. Without one, nodes get no traceparent.

    Spans hold the router's own numbers and names, and the client's `x-request-id`."""

    def __init__(self, sink: Sink | None, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock

    def begin_call(self, traceparent: str) -> Place | None:
        """The call's position in a trace; None if tracing is off."""
        return begin(traceparent) if self._sink is not None else None

    def end_call(self, context: RequestContext, status: int) -> None:
        if self._sink is None or context.trace is None:
            return
        self._sink(_call_span(context, context.trace, status, self._clock()))
        for request in context.in_flight:
            for span in _placement_spans(request, context, context.trace):
                self._sink(span)


def _call_span(context: RequestContext, place: Place, status: int, now: float) -> Span:
    attributes: dict[str, Attribute] = {
        "baton.request": context.id,
        "baton.tenant": context.tenant_name,
        "gen_ai.operation.name": context.operation,
        "http.response.status_code": status,
    }
    if context.client_id:
        attributes["baton.client_request"] = context.client_id
    if context.in_flight:
        usage, request = context.usage(), context.in_flight[0]
        attributes |= {
            "baton.attempts": context.attempts,
            "baton.cached_tokens": usage.cached_tokens,
            "gen_ai.response.model": request.prepared.serving.name,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }
        if request.record.attempts:
            attributes["baton.placement.reason"] = request.record.attempts[-1].placement.reason
        if context.ttft_s is not None:
            attributes["baton.first_token_ms"] = round(context.ttft_s * 1000, 3)
    return Span(
        context.endpoint,
        place,
        context.unix_ns(context.started),
        context.unix_ns(now),
        served=True,
        error=context.failure.code if context.failure is not None else "",
        attributes=attributes,
    )


def _placement_spans(
    request: InFlightRequest, context: RequestContext, place: Place
) -> Iterator[Span]:
    """One span per placement, from when the request needed a place to when it got one."""
    waiting_since = request.record.began
    for attempt in request.record.attempts:
        yield Span(
            "placement",
            below(place),
            context.unix_ns(min(waiting_since, attempt.placed_at)),
            context.unix_ns(attempt.placed_at),
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
