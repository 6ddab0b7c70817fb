"""Lets one call's prompts in and starts them: the first before the call is answered, the others as
their turns come, while it is.

In: the call's prepared prompts. Out: their flights, in the order of the prompts; what they come to
is in the call's outbox. A call that has begun never waits too long for a turn: only its deadline,
its client or an error ends it, and then what waits leaves the queue and what runs ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from baton_protocol.errors import BatonError, ErrorRecord, InternalError
from baton_router.admission.admission import Admission
from baton_router.admission.rate_limiter import BudgetBooking
from baton_router.http.sse import EventStream
from baton_router.observability.request_log import RequestLog
from baton_router.openai.answers import Usage
from baton_router.requests.dispatcher import Dispatcher
from baton_router.requests.in_flight import InFlightRequest, Prepared
from baton_router.requests.output_queue import OutputQueue

logger = logging.getLogger(__name__)


class PromptStarter:
    """Of one call. `flights` grows until all of `prepared` have started. A prompt may wait for its
    first place `waits_until`, where that is said. Who has begun it ends it."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        trail: RequestLog,
        prepared: Sequence[Prepared],
        waits_until: float | None,
    ) -> None:
        self.flights: list[InFlightRequest] = []
        self._admission = admission
        self._dispatcher = dispatcher
        self._trail = trail
        self._prepared = prepared
        self._waits_until = waits_until
        self._booking: BudgetBooking | None = None
        self._task: asyncio.Task[None] | None = None
        self._outbox: OutputQueue | None = None

    async def begin(self, outbox: OutputQueue, events: EventStream | None) -> None:
        """Raise RateLimited, InvalidRequest, QueueFull, QueueTimeout, Unavailable."""
        self._outbox = outbox
        self._booking = await self._admission.charge(self._trail.tenant_name, self._prepared)
        try:
            await self._start(outbox, events)
        except BaseException:
            self.end(None)
            raise
        if len(self.flights) < len(self._prepared):
            self._task = asyncio.create_task(self._start_others(outbox))

    def fail(self, error: ErrorRecord) -> None:
        """Of all that is not over, also of what still waits."""
        for flight in self.flights:
            self._dispatcher.cancel(flight, error)
        if self._outbox is not None:
            self._outbox.fail(error)

    def end(self, usage: Usage | None) -> None:
        """Nobody waits for it any more. `usage` is what it used; None: it never had a place."""
        if self._task is not None:
            self._task.cancel()
        for flight in self.flights:
            self._dispatcher.cancel(flight)
        self._admission.left(self._trail.tenant_name, usage, self._booking)

    async def _start(self, outbox: OutputQueue, events: EventStream | None) -> None:
        """The next prompt when its turn has come, and those that come in with it."""
        begun = len(self.flights)
        waiting = self._prepared[begun:]
        tickets = await self._admission.admit(self._trail, waiting, events, begun > 0)
        entered = list(zip(waiting, tickets, strict=False))
        self.flights += await self._dispatcher.start(entered, outbox, begun, self._waits_until)

    async def _start_others(self, outbox: OutputQueue) -> None:
        try:
            while len(self.flights) < len(self._prepared):
                await self._start(outbox, None)
        except BatonError as error:
            outbox.fail(error.record())
        except Exception:
            logger.exception("a prompt could not be started", extra={"request": self._trail.id})
            told = InternalError(f"the router failed; its log says why, under {self._trail.id}")
            outbox.fail(told.record())
