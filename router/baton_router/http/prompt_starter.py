"""Starts the prompts of one call, as admission lets them in.

In: the call's prepared prompts. Out: their requests in flight, whose output goes to the call's
queue. The first prompt starts before the answer begins, the others while it is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from baton_protocol.errors import BatonError, ErrorRecord
from baton_router.admission.admission import Admission
from baton_router.admission.budgets import BudgetBooking
from baton_router.admission.keep_alive import KeepAlive
from baton_router.errors import router_failed
from baton_router.openai.answers import Usage
from baton_router.requests.context import RequestContext
from baton_router.requests.dispatcher import Dispatcher
from baton_router.requests.in_flight import InFlightRequest
from baton_router.requests.output_queue import OutputQueue
from baton_router.requests.prepared import Prepared

logger = logging.getLogger(__name__)


class PromptStarter:
    """`in_flight` grows until all of `prepared` have started. A prompt may wait for its first place
    until `waits_until`, if given. After start_first(), the caller must call end_call().

    A resumed request that is over is neither admitted nor placed: its stream is known."""

    def __init__(
        self,
        admission: Admission,
        dispatcher: Dispatcher,
        context: RequestContext,
        prepared: Sequence[Prepared],
        waits_until: float | None,
    ) -> None:
        self.in_flight: list[InFlightRequest] = []
        self._admission = admission
        self._dispatcher = dispatcher
        self._context = context
        self._prepared = prepared
        self._waits_until = waits_until
        self._booking: BudgetBooking | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def prompts(self) -> int:
        return len(self._prepared)

    @property
    def choices(self) -> int:
        """Number of choices of all prompts."""
        return sum(item.request.params.n for item in self._prepared)

    async def start_first(self, output: OutputQueue, events: KeepAlive | None) -> None:
        """Charge the budget, start the first prompt, and let the others follow. Raise RateLimited,
        InvalidRequest, QueueFull, QueueTimeout, Unavailable."""
        resumed = self._prepared[0].resumed
        if resumed is not None and resumed.over:
            self.in_flight.append(self._dispatcher.note_ended(self._prepared[0], resumed, output))
            return
        self._booking = await self._admission.charge_call(self._context.tenant_name, self._prepared)
        try:
            await self._start_next(output, events)
        except BaseException:
            self.end_call(None)
            raise
        if len(self.in_flight) < len(self._prepared):
            self._task = asyncio.create_task(self._start_others(output))

    def fail_requests(self, error: ErrorRecord) -> None:
        """Fail all unfinished requests, also those that wait for a place."""
        for request in self.in_flight:
            self._dispatcher.cancel_request(request, error)

    def end_call(self, usage: Usage | None) -> None:
        """End the call. `usage` is what it used; None if it never had a place."""
        if self._task is not None:
            self._task.cancel()
        for request in self.in_flight:
            self._dispatcher.cancel_request(request)
        self._admission.end_call(self._context.tenant_name, usage, self._booking)

    async def _start_next(self, output: OutputQueue, events: KeepAlive | None) -> None:
        """Wait for the next prompt's turn; start it, and those that admission lets in with it."""
        begun = len(self.in_flight)
        waiting = self._prepared[begun:]
        tickets = await self._admission.admit_prompts(self._context, waiting, events, begun > 0)
        entered = list(zip(waiting, tickets, strict=False))
        self.in_flight += await self._dispatcher.start_requests(
            entered, output, begun, self._waits_until
        )

    async def _start_others(self, output: OutputQueue) -> None:
        try:
            while len(self.in_flight) < len(self._prepared):
                await self._start_next(output, None)
        except BatonError as refusal:
            output.put_error(refusal.record())
        except Exception:
            logger.exception("starting a prompt failed", extra={"request": self._context.id})
            output.put_error(router_failed(self._context.id))
