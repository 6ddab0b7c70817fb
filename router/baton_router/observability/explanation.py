"""GET /requests/{id}: how the router served a request.

In: the contexts of calls as they begin and end. Out: JSON that explains one call, or one of its
requests. It holds counts, names, times and reasons of the router, and the client's `x-request-id`.
It contains no text, no token ids and no error message, since those may repeat what a client wrote.
Times are milliseconds; `at_ms` counts from the call's start.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from baton_protocol.errors import NotFound
from baton_protocol.ids import NodeId
from baton_protocol.link import RequestStats
from baton_router.auth import Tenant
from baton_router.requests.attempt import Attempt, Wait
from baton_router.requests.context import RequestContext
from baton_router.requests.in_flight import InFlightRequest

Json = dict[str, Any]

MAX_BYTES = 32 << 20
# An answer's id has a dialect's prefix before the id of x-baton-request-id.
_PREFIX = re.compile(r"\A(?:[a-z]+[-_])+(?=[0-9a-f]{32})")
SHOWN = 64  # characters of an unknown id in an error
# Prompts of a call that an explanation shows.
MAX_PROMPTS = 64


class Explanation(msgspec.Struct, kw_only=True):
    """What `openapi` documents of an explanation: docs/api.md says what each request has."""

    id: str
    state: str
    requests: list[dict[str, Any]]


class ExplanationHistory:
    """Explains running calls, and the last ones that ended.

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
        self._running: dict[str, RequestContext] = {}
        self._ended: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Number of ended calls that are kept."""
        return len(self._ended)

    @property
    def bytes(self) -> int:
        """Total size of the kept calls."""
        return self._bytes

    @property
    def running(self) -> Iterable[RequestContext]:
        """The running calls, the oldest first."""
        return self._running.values()

    def begin_call(self, context: RequestContext) -> None:
        self._running[context.id] = context

    def end_call(self, context: RequestContext, status: int) -> None:
        """`status` is what the client saw, or would have seen."""
        self._running.pop(context.id, None)
        if not self._max_calls or context.tenant is None:
            return
        kept = encode_explanation(explain_call(context, status, self._clock()))
        self._ended[context.id] = (context.tenant.name, kept)
        self._bytes += len(kept)
        while len(self._ended) > self._max_calls or self._bytes > self._max_bytes:
            _, (_, oldest) = self._ended.popitem(last=False)
            self._bytes -= len(oldest)

    def find(self, wanted: str, reader: Tenant) -> Json:
        """The explanation of a call, or of one of its requests. Raise NotFound, also for another
        tenant's call, so that ids do not leak."""
        request_id = _PREFIX.sub("", wanted, count=1)
        call_id, _, slot = request_id.partition("-")
        explanation = self._find_call(call_id, reader)
        if explanation is not None and slot:
            explanation = only_request(explanation, request_id)
        if explanation is None:
            raise NotFound(
                f"request {wanted[:SHOWN]!r} is unknown; this router knows its running requests "
                f"and the last {self._max_calls} that ended here; ask the router that served it",
                code="request_not_found",
            )
        return explanation

    def _find_call(self, call_id: str, reader: Tenant) -> Json | None:
        if (context := self._running.get(call_id)) is not None:
            owner = context.tenant.name if context.tenant is not None else None
            if reader.admin or reader.name == owner:
                return explain_call(context, None, self._clock())
        elif (kept := self._ended.get(call_id)) is not None:
            owner, encoded = kept
            if reader.admin or reader.name == owner:
                explanation: Json = msgspec.json.decode(encoded)
                return explanation
        return None


def explain_call(context: RequestContext, status: int | None, now: float) -> Json:
    """Explain a call; `status` is None while it runs."""
    in_flight, usage = context.in_flight, context.usage()
    return {
        "id": context.id,
        "client_request_id": context.client_id or None,
        "endpoint": context.endpoint,
        "tenant": context.tenant_name,
        "model": in_flight[0].prepared.serving.name if in_flight else None,
        "came": round(context.came, 3),
        "state": "running" if status is None else "ended",
        "status": status,
        "error": context.failure.code if context.failure is not None else None,
        "held": context.waits or None,
        "prepared_ms": _since(context.started, in_flight[0].record.began if in_flight else None),
        "first_token_ms": _ms(context.ttft_s),
        "total_ms": _since(context.started, now),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "exact": context.exact(),
        "requests": [
            _explain_request(request, context.started, now) for request in in_flight[:MAX_PROMPTS]
        ],
        "requests_left_out": max(0, len(in_flight) - MAX_PROMPTS),
    }


def encode_explanation(explanation: Json) -> bytes:
    """Encode as JSON. numpy numbers from predictions become floats."""
    return msgspec.json.encode(explanation, enc_hook=float)


def only_request(explanation: Json, request_id: str) -> Json | None:
    """The explanation with only one of its requests; None if it has no such request."""
    requests = [request for request in explanation["requests"] if request["id"] == request_id]
    return explanation | {"requests": requests} if requests else None


def _explain_request(request: InFlightRequest, started: float, now: float) -> Json:
    record = request.record
    return {
        "id": request.id,
        "state": record.end or record.phase,
        "prompt_tokens": len(record.request.prompt_ids),
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.tokens,
        "drafts": _explain_drafts(record.attempts),
        "waits": _explain_waits(record.waits, started, now),
        "attempts": [_explain_attempt(attempt, started) for attempt in record.attempts],
        "attempts_left_out": record.left_out,
    }


def _explain_drafts(attempts: Sequence[Attempt]) -> Json:
    """Guesses of the next tokens, as far as nodes have reported them: how many were computed, how
    many were right, and of these those that a grammar forced."""
    stats = [stats for attempt in attempts for _, stats in attempt.measured]
    return {
        "drafted": sum(each.drafted_tokens for each in stats),
        "accepted": sum(each.accepted_drafts for each in stats),
        "forced": sum(each.forced_drafts for each in stats),
    }


def _explain_waits(waits: Sequence[Wait], started: float, now: float) -> list[Json]:
    return [
        {
            "at_ms": _since(started, wait.since),
            "ms": _since(wait.since, now if wait.until is None else wait.until),
            "why": wait.why,
        }
        for wait in waits
    ]


def _explain_attempt(attempt: Attempt, started: float) -> Json:
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
        "fetch_or_compute": _explain_fetch(attempt.measured[0][1]) if attempt.measured else None,
        "measured": [_node_stats(node, stats) for node, stats in attempt.measured],
        "prefill_given_up_at_ms": _since(started, attempt.prefill_given_up_at),
        "ended": None
        if attempt.ended is None
        else {
            "why": attempt.ended,
            "at_ms": _since(started, attempt.ended_at),
            "node": attempt.blamed,
        },
    }


def _node_stats(node: NodeId, stats: RequestStats) -> Json:
    return {"node": node, **msgspec.structs.asdict(stats)}


def _explain_fetch(stats: RequestStats) -> Json:
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
