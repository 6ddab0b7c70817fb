"""What a call's explanation says: plain JSON from its trail and its requests' stories.

In: the trail, at any moment. Out: counts, names, times and reasons of ours, and the client's own
`x-request-id`; no text, no ids of tokens, no error's message, since that may repeat what a client
wrote. Milliseconds; `at_ms` counts
from when the call came.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_protocol.ids import NodeId
from baton_protocol.link import RequestStats
from baton_router.observability.request_log import RequestLog
from baton_router.requests.in_flight import InFlightRequest
from baton_router.requests.timeline import Attempt, Timeline

Json = dict[str, Any]

# Of a call with more prompts these are told.
MAX_PROMPTS = 64


class Explanation(msgspec.Struct, kw_only=True):
    """What `openapi` documents of an explanation: docs/api.md says what each request has."""

    id: str
    state: str
    requests: list[dict[str, Any]]


def explanation(trail: RequestLog, status: int | None, now: float) -> Json:
    """`status` is None as long as the call runs."""
    answer = trail.answer
    flights = answer.flights if answer is not None else ()
    usage = answer.usage() if answer is not None else None
    ttft_s = answer.ttft_s if answer is not None else None
    return {
        "id": trail.id,
        "client_request_id": trail.client_id or None,
        "endpoint": trail.endpoint,
        "tenant": trail.tenant_name,
        "model": flights[0].prepared.serving.name if flights else None,
        "came": round(trail.came, 3),
        "state": "running" if status is None else "ended",
        "status": status,
        "error": trail.failure.code if trail.failure is not None else None,
        "held": trail.waits or None,
        "prepared_ms": _since(trail.started, flights[0].story.began if flights else None),
        "first_token_ms": _ms(ttft_s),
        "total_ms": _since(trail.started, now),
        "prompt_tokens": usage.prompt_tokens if usage is not None else 0,
        "cached_tokens": usage.cached_tokens if usage is not None else 0,
        "completion_tokens": usage.completion_tokens if usage is not None else 0,
        "requests": [_request(flight, trail.started, now) for flight in flights[:MAX_PROMPTS]],
        "requests_left_out": max(0, len(flights) - MAX_PROMPTS),
    }


def encoded(told: Json) -> bytes:
    """Numbers of any kind are taken: predictions may come out of arrays."""
    return msgspec.json.encode(told, enc_hook=float)


def one_of(told: Json, request_id: str) -> Json | None:
    """The same with one of its requests only."""
    found = [one for one in told["requests"] if one["id"] == request_id]
    return told | {"requests": found} if found else None


def _request(flight: InFlightRequest, started: float, now: float) -> Json:
    record, story = flight.record, flight.story
    return {
        "id": flight.id,
        "state": story.end or record.phase,
        "prompt_tokens": len(record.request.prompt_ids),
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.tokens,
        "waits": _waits(story, started, now),
        "attempts": [_attempt(one, started) for one in story.attempts],
        "attempts_left_out": story.left_out,
    }


def _waits(story: Timeline, started: float, now: float) -> list[Json]:
    return [
        {
            "at_ms": _since(started, wait.since),
            "ms": _since(wait.since, now if wait.until is None else wait.until),
            "why": wait.why,
        }
        for wait in story.waits
    ]


def _attempt(one: Attempt, started: float) -> Json:
    place, chosen = one.placement, one.chosen
    decoding_ms = _since(one.placed_at, one.decoding_at)
    return {
        "attempt": one.number,
        "at_ms": _since(started, one.placed_at),
        "prefill": place.prefill,
        "decode": place.decode,
        "reason": place.reason,
        "explanation": place.explanation,
        "uncached_tokens": place.uncached,
        "known": {
            "store_up": one.known.store_up,
            "chunks": one.known.chunks,
            "stored_chunks": one.known.stored_chunks,
            "cached_tokens": chosen.cached_tokens if chosen is not None else None,
        },
        "considered": place.considered,
        "predicted_ms": round(place.predicted_ms, 3),
        "expected_ms": round(one.expected_ms, 3),
        "first_token_ms": _since(one.placed_at, one.first_at),
        "decoding_ms": decoding_ms,
        "error_ms": None if decoding_ms is None else round(decoding_ms - one.expected_ms, 3),
        "fetch_or_compute": _fetching(one.measured[0][1]) if one.measured else None,
        "measured": [_stats(node, stats) for node, stats in one.measured],
        "prefill_given_up_at_ms": _since(started, one.alone_at),
        "ended": None
        if one.ended is None
        else {"why": one.ended, "at_ms": _since(started, one.ended_at), "node": one.blamed},
    }


def _stats(node: NodeId, stats: RequestStats) -> Json:
    return {"node": node, **msgspec.structs.asdict(stats)}


def _fetching(stats: RequestStats) -> Json:
    """What the node that had to have the prompt did about what the store held of it."""
    did = {
        (False, False): "nothing to fetch",
        (True, False): "fetched",
        (False, True): "computed",
        (True, True): "fetched some, computed some",
    }[stats.fetched_tokens > 0, stats.declined_tokens > 0]
    return {
        "did": did,
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
