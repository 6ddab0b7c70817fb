"""Answers the lines of batches, as the generation routes would answer the same requests.

In: lines of inputs, in the room that other requests leave. Out: their lines in the output or in the
error file. Calls run in the background (see `admission`): they start after all others, where the
pool has room to spare. What can go well later is tried again: a full pool, a used-up budget, a pool
without nodes. A body without a seed gets one that follows from its batch and its line, so that a
line which runs again, as its router died, has the same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable

import msgspec

from baton_protocol.errors import BatonError, ErrorRecord, InvalidRequest
from baton_router.auth import Tenant
from baton_router.batches.journal import LineAnswer
from baton_router.batches.lines import RawLine, answered_line, read_line
from baton_router.batches.records import BatchOrder
from baton_router.errors import RequestFailed, error_record, router_failed
from baton_router.http.body_limits import parse_body
from baton_router.http.dialects import DIALECTS
from baton_router.http.generation import GenerationRoutes
from baton_router.requests.context import RequestContext
from baton_router.responses.call import ResponseCall

# Lines that wait for room, of all batches together: enough to fill a pool within moments, few
# enough to cost nothing while it is full.
MOST_WAITING = 16
MOST_RUNNING = 1024
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between two tries of a line
LATER = (429, 503)  # errors that another try may not have

logger = logging.getLogger(__name__)


class _Line:
    """A line that is being answered. `context` is that of its current try; None in a pause."""

    def __init__(self) -> None:
        self.context: RequestContext | None = None

    @property
    def waits(self) -> bool:
        return self.context is None or not self.context.in_flight


class BatchLines:
    """The LineRunner of batches. `answered` receives whether a line succeeded."""

    def __init__(
        self,
        generation: GenerationRoutes,
        new_id: Callable[[], str],
        tenant_of: Callable[[str], Tenant | None],
        answered: Callable[[bool], None],
    ) -> None:
        self._generation = generation
        self._new_id = new_id
        self._tenant_of = tenant_of
        self._answered = answered
        self._lines: set[_Line] = set()
        self._waiting: set[_Line] = set()

    @property
    def stopping(self) -> bool:
        return self._generation.draining

    def has_room(self) -> bool:
        self._waiting = {line for line in self._waiting if line.waits}
        return len(self._waiting) < MOST_WAITING and len(self._lines) < MOST_RUNNING

    async def answer(self, order: BatchOrder, line: RawLine) -> LineAnswer | None:
        one = _Line()
        self._lines.add(one)
        self._waiting.add(one)
        try:
            return await self._answer(order, line, one)
        finally:
            self._lines.discard(one)
            self._waiting.discard(one)

    async def _answer(self, order: BatchOrder, line: RawLine, one: _Line) -> LineAnswer | None:
        dialect, given = DIALECTS[order.endpoint], read_line(line)
        pause_s = PAUSE_S
        while not self.stopping:
            request_id = self._new_id()
            try:
                body = await self._ask(order, line.number, bytes(given.body), request_id, one)
                failure = None
            except (BatonError, RequestFailed) as error:
                failure = error_record(error)
            except Exception:
                logger.exception("a line of %s failed", order.id, extra={"request": request_id})
                failure = router_failed(request_id)
            if failure is None or failure.status not in LATER:
                if failure is not None:
                    body = msgspec.json.encode(dialect.error_body(failure, request_id))
                self._answered(failure is None)
                status = 200 if failure is None else failure.status
                data = answered_line(order, line, given.custom_id, status, request_id, body)
                return LineAnswer(line.number, failure is None, data)
            one.context = None
            self._waiting.add(one)
            await asyncio.sleep(_pause_s(failure, pause_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return None

    async def _ask(
        self, order: BatchOrder, number: int, body: bytes, request_id: str, one: _Line
    ) -> bytes:
        """Ask once. Raise BatonError, RequestFailed."""
        dialect, generation = DIALECTS[order.endpoint], self._generation
        lock = generation.intake.bodies.huge_body_lock
        call = await parse_body(bytearray(body), dialect.parse, lambda: lock)
        if call.options.stream:
            raise InvalidRequest(
                "stream is true; a request of a batch has no stream, leave it out", param="stream"
            )
        if isinstance(call, ResponseCall) and (call.keeps or call.background or call.previous):
            raise InvalidRequest(
                "a response of a batch is not kept and continues none; leave out store, background"
                " and previous_response_id",
                param="store",
            )
        tenant = self._tenant_of(order.tenant)
        if tenant is None:
            raise InvalidRequest(f"tenant {order.tenant!r} has no API key any more")
        context = RequestContext(request_id, generation.clock(), dialect, background=True)
        context.tenant = tenant
        one.context = context
        return await generation.ask(call, context, rng=random.Random(_seed(order.id, number)))


def _pause_s(failure: ErrorRecord, pause_s: float) -> float:
    wanted = failure.retry_after if failure.retry_after is not None else pause_s
    return min(max(wanted, PAUSE_S), LONGEST_PAUSE_S)


def _seed(batch: str, number: int) -> int:
    """The same for the same line, and else another."""
    return int.from_bytes(hashlib.sha256(f"{batch} {number}".encode()).digest()[:8])
