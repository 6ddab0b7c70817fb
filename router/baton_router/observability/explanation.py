"""GET /requests/{id}: the explanations of calls that run, and of the last ones that ended.

In: trails as calls begin and end. Out: JSON: counts, names, times and reasons of ours, and the
client's own `x-request-id`; no text, no ids of tokens, no error's message, since that may repeat
what a client wrote. Milliseconds; `at_ms` counts from when the call came.

What has ended is kept encoded, so that its size is known: at most so many calls, and MAX_BYTES of
them. A call without a tenant, as one with a wrong key, is not kept: nobody can push out what others
may want to read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton_protocol.errors import NotFound
from baton_protocol.ids import NodeId
from baton_protocol.link import RequestStats
from baton_router.auth import Tenant
from baton_router.observability.request_log import RequestLog
from baton_router.requests.attempts import Attempt, Wait
from baton_router.requests.in_flight import InFlightRequest

Json = dict[str, Any]

MAX_BYTES = 32 << 20
# What OpenAI's fields put before the id of x-baton-request-id.
PREFIXES = ("chatcmpl-", "cmpl-")
SHOWN = 64  # characters of an id that nobody knows
# Of a call with more prompts so many are shown.
MAX_PROMPTS = 64


class Explanation(msgspec.Struct, kw_only=True):
    """What `openapi` documents of an explanation: docs/api.md says what each request has."""

    id: str
    state: str
    requests: list[dict[str, Any]]


class ExplanationHistory:
    """`most` calls that ended are kept, 0 none."""

    def __init__(self, most: int, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._most = most
        self._clock = clock
        self._max_bytes = max_bytes
        self._running: dict[str, RequestLog] = {}
        self._ended: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Of calls that ended."""
        return len(self._ended)

    @property
    def bytes(self) -> int:
        """What is kept of them."""
        return self._bytes

    def begin(self, trail: RequestLog) -> None:
        self._running[trail.id] = trail

    def end(self, trail: RequestLog, status: int) -> None:
        """`status` is what the client saw, or would have seen."""
        self._running.pop(trail.id, None)
        if not self._most or trail.tenant is None:
            return
        kept = encoded(explanation(trail, status, self._clock()))
        self._ended[trail.id] = (trail.tenant.name, kept)
        self._bytes += len(kept)
        while len(self._ended) > self._most or self._bytes > self._max_bytes:
            _, (_, oldest) = self._ended.popitem(last=False)
            self._bytes -= len(oldest)

    def find(self, wanted: str, reader: Tenant) -> Json:
        """Of a whole call, or of one of its requests. Raise NotFound; also for another tenant's,
        so that nobody learns which ids there are."""
        request_id = wanted
        for prefix in PREFIXES:
            request_id = request_id.removeprefix(prefix)
        call_id, _, slot = request_id.partition("-")
        found = self._find_call(call_id, reader)
        if found is not None and slot:
            found = one_of(found, request_id)
        if found is None:
            raise NotFound(
                f"request {wanted[:SHOWN]!r} is not known: a router tells of requests that it runs"
                f" and of the last {self._most} that ended at it; each knows only its own",
                code="request_not_found",
            )
        return found

    def _find_call(self, call_id: str, reader: Tenant) -> Json | None:
        if (trail := self._running.get(call_id)) is not None:
            owner = trail.tenant.name if trail.tenant is not None else None
            mine = reader.admin or reader.name == owner
            return explanation(trail, None, self._clock()) if mine else None
        if (kept := self._ended.get(call_id)) is not None and (
            reader.admin or reader.name == kept[0]
        ):
            found: Json = msgspec.json.decode(kept[1])
            return found
        return None


def explanation(trail: RequestLog, status: int | None, now: float) -> Json:
    """`status` is None as long as the call runs."""
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
        "requests": [_request(request, trail.started, now) for request in in_flight[:MAX_PROMPTS]],
        "requests_left_out": max(0, len(in_flight) - MAX_PROMPTS),
    }


def encoded(explanation: Json) -> bytes:
    """Numbers of any kind are taken: predictions may come out of arrays."""
    return msgspec.json.encode(explanation, enc_hook=float)


def one_of(explanation: Json, request_id: str) -> Json | None:
    """The same with one of its requests only."""
    found = [one for one in explanation["requests"] if one["id"] == request_id]
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
        "attempts": [_attempt(one, started) for one in record.attempts],
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
            "store_up": one.basis.store_up,
            "chunks": one.basis.chunks,
            "stored_chunks": one.basis.stored_chunks,
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
        "prefill_given_up_at_ms": _since(started, one.prefill_given_up_at),
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
