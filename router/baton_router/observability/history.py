"""GET /requests/{id}: the explanations of calls that run, and of the last ones that ended.

In: trails as calls begin and end. Out: JSON. What has ended is kept encoded, so that its size is
known: at most so many calls, and MAX_BYTES of them. A call without a tenant, as one with a wrong
key, is not kept: nobody can push out what others may want to read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from baton_protocol.errors import NotFound
from baton_router.auth import Tenant
from baton_router.observability.explanation import Json, encoded, explanation, one_of
from baton_router.observability.request_log import RequestLog

MAX_BYTES = 32 << 20
# What OpenAI's fields put before the id of x-baton-request-id.
PREFIXES = ("chatcmpl-", "cmpl-")
SHOWN = 64  # characters of an id that nobody knows


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
        told = encoded(explanation(trail, status, self._clock()))
        self._ended[trail.id] = (trail.tenant.name, told)
        self._bytes += len(told)
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
        told = self._told(call_id, reader)
        if told is not None and slot:
            told = one_of(told, request_id)
        if told is None:
            raise NotFound(
                f"request {wanted[:SHOWN]!r} is not known: a router tells of requests that it runs"
                f" and of the last {self._most} that ended at it; each knows only its own",
                code="request_not_found",
            )
        return told

    def _told(self, call_id: str, reader: Tenant) -> Json | None:
        if (trail := self._running.get(call_id)) is not None:
            owner = trail.tenant.name if trail.tenant is not None else None
            mine = reader.admin or reader.name == owner
            return explanation(trail, None, self._clock()) if mine else None
        if (kept := self._ended.get(call_id)) is not None and (
            reader.admin or reader.name == kept[0]
        ):
            told: Json = msgspec.json.decode(kept[1])
            return told
        return None
