"""Places requests on nodes, sends their jobs, and places them again when a node is lost.

In: prepared requests that admission admitted, frames from nodes, and nodes lost or resumed. Out:
deltas in the call's output queue, and frames to nodes. Choosing a node, booking its load and
queueing the jobs happens without an await. A request that no node can take waits in its own task,
which retries whenever the pool changes.

A request stays on one kind of nodes once its client has any output. Before that, it may switch to
the kind that the pool serves now. A request that cannot switch, and whose kind a roll-out has
removed for good, fails with the error `rolled_out`.

A request that may be killing its nodes (see `state`) is on probation. Only one request on probation
has a place at a time, because the guilty one would take the others down with its node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from baton_protocol.errors import ErrorRecord, Unavailable
from baton_protocol.ids import NodeId, RequestId
from baton_protocol.link import Deltas, JobFailed, PrefillDone, PrefillJob, RunJob, ToNode
from baton_protocol.resume import ResumeState
from baton_router.errors import router_failed
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.link import Loss
from baton_router.placement.placement import Missing, Placement
from baton_router.requests.attempt import Cause, FirstTokenTimes, PlacementBasis
from baton_router.requests.in_flight import InFlightRequest, rolled_out_error
from baton_router.requests.output_queue import OutputQueue
from baton_router.requests.placer import Placer, Stored
from baton_router.requests.prepared import Prepared
from baton_router.requests.state import (
    Action,
    Emit,
    Ended,
    Failed,
    Measured,
    Regroup,
    Replace,
    RequestRecord,
    Send,
)
from baton_router.requests.ticket import Ticket
from baton_router.requests.tokenize import fits_serving, prepare_for_kind

logger = logging.getLogger(__name__)


def _with_time_left(frame: ToNode, request: InFlightRequest, now: float) -> ToNode:
    """Set a job's remaining time at the moment it is sent."""
    deadline = request.prepared.deadline
    if deadline is None or not isinstance(frame, PrefillJob | RunJob):
        return frame
    timed = msgspec.structs.replace(frame.request, time_left=max(0.0, deadline - now))
    return msgspec.structs.replace(frame, request=timed)


class Dispatcher:
    """Listens to the fleet's links (a RequestListener) and drives every request to its end.

    `in_flight` holds the requests that have not ended. The dispatcher does not offer a request to a
    node that refused it again for `refused_s` seconds."""

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        metrics: RouterMetrics,
        *,
        unready_wait_s: float,
        refused_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._metrics = metrics
        self._unready_wait_s = unready_wait_s
        self._refused_s = refused_s
        self._clock = clock
        self._change = asyncio.Event()
        self._on_probation: RequestId | None = None  # the request on probation that has a place
        self.in_flight: dict[RequestId, InFlightRequest] = {}

    async def start_requests(
        self,
        entered: Sequence[tuple[Prepared, Ticket]],
        output: OutputQueue,
        first_slot: int = 0,
        waits_until: float | None = None,
    ) -> list[InFlightRequest]:
        """Place these requests of one call; those that find no place wait until `waits_until`.

        `waits_until` is a time of the dispatcher's clock; by default the policy sets it. The first
        request writes to slot `first_slot` of the output, the next to the following slot. Raise
        Unavailable if a request finds no place and must not wait; then every ticket is over."""
        requests: list[InFlightRequest] = []
        try:
            chunks = [name for item, _ in entered for name in item.chunks]
            stored = await self._placer.look_up_chunks(entered[0][0].kind, chunks)
            offset = 0
            if waits_until is None:
                fails = self._placer.policy.missing_role == "fail"
                waits_until = self._clock() + (0.0 if fails else self._unready_wait_s)
            for slot, (item, ticket) in enumerate(entered, first_slot):
                held = stored[offset : offset + len(item.chunks)]
                offset += len(item.chunks)
                record = RequestRecord(item.request, self._clock, item.resumed)
                if item.resumed is not None:
                    ticket.free_choices(len(item.resumed.finished))
                request = InFlightRequest(record, item, ticket, output, slot, waits_until)
                requests.append(request)
                self._launch(request, held)
                ticket.report_placed()
        except BaseException:
            for request in requests:
                self.cancel_request(request)
            for _, ticket in entered:
                ticket.release()
            raise
        return requests

    def note_ended(
        self, item: Prepared, resumed: ResumeState, output: OutputQueue
    ) -> InFlightRequest:
        """A resumed request that was already over: nothing is placed, and the output ends."""
        record = RequestRecord(item.request, self._clock, resumed)
        record.note_wait("the stream has ended, and the index has the rest of it")
        if resumed.error is not None:
            output.put_error(resumed.error)
        output.end_request()
        return InFlightRequest(record, item, Ticket(0), output, 0, give_up_at=self._clock())

    def cancel_request(self, request: InFlightRequest, error: ErrorRecord | None = None) -> None:
        """End a request on all its nodes. No effect on one that has ended."""
        self._apply_actions(request, request.record.cancel(error))
        self._close_request(request)

    # --- frames from nodes ------------------------------------------------------------------------

    def on_deltas(self, node: NodeId, frame: Deltas) -> None:
        for delta in frame.items:
            request = self.in_flight.get(delta.request)
            if request is None:
                continue
            if request.record.append_tokens(node, delta):
                request.output.put_delta(request.slot, delta)
            else:
                if delta.attempt == request.record.attempt:
                    self._placer.view.prefilled(node, request.id)
                self._apply_actions(request, request.record.on_delta(node, delta))

    def on_prefill_done(self, node: NodeId, frame: PrefillDone) -> None:
        request = self.in_flight.get(frame.request)
        if request is not None and request.record.prefill == node:
            actions = request.record.on_prefill_done(node, frame)
            if actions:
                self._placer.view.release(node, request.id)
                self._apply_actions(request, actions)

    def on_failed(self, node: NodeId, frame: JobFailed) -> None:
        request = self.in_flight.get(frame.request)
        actions = request.record.on_failed(node, frame) if request is not None else []
        if request is not None and actions:
            self._log(logging.WARNING, request, node, f"job failed: {frame.error.message}")
            self._placer.view.release(node, request.id)
            self._apply_actions(request, actions)

    def on_lost(self, node: NodeId, cause: Loss, alive_at: float) -> None:
        for request in self._requests_on(node):
            current = request.record.current
            blamed = current is not None and current.placed_at <= alive_at
            try:
                self._apply_actions(request, request.record.on_lost(node, cause, blamed=blamed))
            except Exception:  # our bug; still place the node's other requests again
                self._end_after_bug(request)

    def on_resumed(self, node: NodeId) -> None:
        for request in self._requests_on(node):
            self._log(logging.INFO, request, node, "continues: the link is back")
            self._apply_actions(request, request.record.on_resumed(node))

    def on_leaving(self, node: NodeId) -> None:
        for request in self._requests_on(node):
            if request.task is not None and not request.task.done():
                continue  # a task already looks for its place
            if actions := request.record.on_leaving(node):
                self._apply_actions(request, actions)
            elif self._placer.is_served(request.prepared.kind):
                self._start_task(request, partial(self._move_request, request, node))
            elif self._placer.replacing_revision(request.prepared.kind):
                self._apply_actions(request, request.record.on_rolled_out(node))

    def next_change(self) -> asyncio.Event:
        """The event that the next change of the pool sets."""
        return self._change

    def on_change(self) -> None:
        """Wake the requests that wait for a place."""
        self._change.set()
        self._change = asyncio.Event()

    # --- places -----------------------------------------------------------------------------------

    def _launch(self, request: InFlightRequest, stored: Stored) -> None:
        self.in_flight[request.id] = request
        if self._try_to_place(request, stored):
            return
        superseded = self._fleet.offers.is_superseded(request.prepared.kind)
        if self._clock() >= request.give_up_at and not superseded:
            raise self._unavailable_error(request)
        self._start_task(request, partial(self._wait_for_place, request))

    def _try_to_place(self, request: InFlightRequest, stored: Stored) -> bool:
        """Place the request or end it. Return False if it has to wait."""
        record = request.record
        failure = record.check_strikes(self._placer.count_existing_chunks(request, stored))
        if failure:
            self._apply_actions(request, failure)
            return True
        if record.on_probation and self._on_probation is not None:
            record.note_wait(
                "the request lost several nodes in a row; such requests run one at a time"
            )
            return False
        placement = self._placer.find_placement(request, stored, self._clock())
        if isinstance(placement, Missing):
            reason = f"{placement.explanation} (nodes: {self._placer.view.states() or 'none'})"
            others = self._placer.of_other_kinds(request)
            record.note_wait(reason + self._placer.missing_version(request) + others)
            return False
        self._start_attempt(request, placement, stored)
        return True

    def _start_attempt(
        self, request: InFlightRequest, placement: Placement, stored: Stored
    ) -> None:
        record = request.record
        basis = PlacementBasis(
            store_up=self._placer.store_up,
            chunks=len(request.prepared.chunks),
            stored_chunks=sum(stored),
            exact=self._placer.exactness_of(placement),
        )
        epoch = self._placer.book_placement(request, placement)
        if record.on_probation:
            self._on_probation = request.id
        actions = record.start_attempt(placement, epoch, basis)
        self._metrics.placed(placement, record.replaced_for, record.tokens)
        self._log(logging.DEBUG, request, placement.decode, f"placed: {placement.header_line()}")
        self._apply_actions(request, actions)

    async def _wait_for_place(self, request: InFlightRequest) -> None:
        """Retry until the request has a place or has ended."""
        record = request.record
        while record.phase == "waiting":
            change = self._change  # read before the lookup, so no change is missed
            item = request.prepared
            stored = await self._placer.look_up_chunks(item.kind, item.chunks)
            now = self._clock()  # also before the lookup
            if self._try_to_place(request, stored):
                return
            if await self._switch_kind(request):
                continue
            if revision := self._placer.replacing_revision(item.kind):
                self.cancel_request(request, rolled_out_error(revision).record())
                return
            limits = [until for until in request.refused.values() if until > now]
            if record.attempt == 0:
                limits.append(request.give_up_at)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(limits) - now if limits else None):
                    await change.wait()
            if record.attempt == 0 and self._clock() >= request.give_up_at:
                self.cancel_request(request, self._unavailable_error(request).record())

    async def _switch_kind(self, request: InFlightRequest) -> bool:
        """Move a request whose client has no output to the kind of nodes that is served now."""
        item, record = request.prepared, request.record
        fitting = partial(fits_serving, item)
        if not record.client_has_nothing:
            return False
        successor = self._fleet.offers.find_successor(item.kind, item.wanted, fitting)
        if successor is None:
            return False
        request.prepared = await prepare_for_kind(item, successor)
        record.request = request.prepared.request
        message = f"moves to the nodes of {successor.sample.revision or 'another kind'}"
        self._log(logging.INFO, request, None, message)
        return True

    async def _move_request(self, request: InFlightRequest, leaving: NodeId) -> None:
        """Move the request to another node, with the tokens that its client has. If no other node
        can take it, it stays; the node's next load report triggers another try."""
        item = request.prepared
        stored = await self._placer.look_up_chunks(item.kind, item.chunks)
        placement = self._placer.find_placement(request, stored, self._clock())
        if isinstance(placement, Missing) or leaving in (placement.decode, placement.prefill):
            return
        self._log_loss(request, "drained", leaving)
        self._start_attempt(request, placement, stored)

    async def _find_other_pair(self, request: InFlightRequest, lost: NodeId) -> None:
        """Find another pair for a request that lost its prefill node, or let its decode node
        compute the prompt. Any other event for the request cancels this task."""
        record, item = request.record, request.prepared
        stored = await self._placer.look_up_chunks(item.kind, item.chunks)
        failure = record.check_strikes(self._placer.count_existing_chunks(request, stored))
        if failure:
            self._apply_actions(request, failure)
            return
        placement = self._placer.find_placement(request, stored, self._clock())
        if isinstance(placement, Placement) and placement.prefill is not None:
            self._start_attempt(request, placement, stored)
        elif record.decode is not None and not self._placer.is_reachable(record.decode):
            both_lost = record.on_lost(record.decode, "link")
            self._apply_actions(request, both_lost)
        else:
            self._apply_actions(request, record.give_up_prefill(f"prefill node {lost} is gone"))

    def _unavailable_error(self, request: InFlightRequest) -> Unavailable:
        return Unavailable(f"the router cannot serve the request now: {request.record.waits_for}")

    # --- one request ------------------------------------------------------------------------------

    def _requests_on(self, node: NodeId) -> Iterator[InFlightRequest]:
        """The requests that run on this node."""
        for request in list(self.in_flight.values()):
            if node in (request.record.decode, request.record.prefill):
                yield request

    def _apply_actions(self, request: InFlightRequest, actions: Sequence[Action]) -> None:
        now = self._clock()  # one time for both jobs of a placement
        for action in actions:
            match action:
                case Emit():
                    self._emit_delta(request, action)
                case Send():
                    self._fleet.send_frame(action.node, _with_time_left(action.frame, request, now))
                case Measured():
                    self._metrics.measured(action.stats, action.attempt, opening=action.opening)
                case Replace():
                    self._note_loss(request, action)
                    self._placer.release_bookings(request)
                    self._end_probation(request)
                    self._start_task(request, partial(self._wait_for_place, request))
                case Regroup():
                    self._note_loss(request, action)
                    self._placer.view.release(action.node, request.id)
                    self._start_task(request, partial(self._find_other_pair, request, action.node))
                case Failed():
                    self._close_request(request)
                    request.output.put_error(action.error)
                case Ended():
                    self._close_request(request)
                    request.output.end_request()

    def _emit_delta(self, request: InFlightRequest, emit: Emit) -> None:
        delta, times = emit.delta, emit.times
        request.output.put_delta(request.slot, delta)
        if delta.finish is not None and request.record.open:  # else Ended follows
            request.ticket.free_choices(1)
            self._placer.release_choice(request)
        if times is not None:
            self._observe_times(times)
        if delta.ids:
            self._end_probation(request)

    def _observe_times(self, times: FirstTokenTimes) -> None:
        if times.pause_s is not None:
            self._metrics.pause.observe(times.pause_s)
        if times.handoff_s is not None:
            self._metrics.handoff.observe(times.handoff_s)
        if times.error is not None:
            self._metrics.missed(times.error)

    def _note_loss(self, request: InFlightRequest, lost: Replace | Regroup) -> None:
        if lost.cause == "refused":
            request.refused[lost.node] = self._clock() + self._refused_s
        self._log_loss(request, lost.cause, lost.node)

    def _log_loss(self, request: InFlightRequest, cause: Cause, node: NodeId) -> None:
        message = f"lost ({cause}) with {request.record.tokens} tokens; placing it again"
        level = logging.INFO if cause == "drained" else logging.WARNING
        self._log(level, request, node, message)

    def _end_probation(self, request: InFlightRequest) -> None:
        """Free the probation slot if the request lost its place or left probation."""
        if self._on_probation != request.id:
            return
        placed = request.record.current is not None and request.id in self.in_flight
        if not (placed and request.record.on_probation):
            self._on_probation = None
            self.on_change()

    def _start_task(self, request: InFlightRequest, work: Callable[[], Awaitable[None]]) -> None:
        """Replace the request's task."""
        self._cancel_task(request)
        request.task = asyncio.create_task(self._run_guarded(request, work))

    async def _run_guarded(
        self, request: InFlightRequest, work: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await work()
        except Exception:
            self._end_after_bug(request)

    def _end_after_bug(self, request: InFlightRequest) -> None:
        logger.exception("placing the request failed", extra={"request": request.id})
        self.cancel_request(request, router_failed(request.id))

    def _cancel_task(self, request: InFlightRequest) -> None:
        if request.task is not None and request.task is not asyncio.current_task():
            request.task.cancel()
        request.task = None

    def _close_request(self, request: InFlightRequest) -> None:
        if self.in_flight.pop(request.id, None) is None:
            return
        self._cancel_task(request)
        request.ticket.release()
        self._placer.release_bookings(request)
        self._end_probation(request)
        self._log(logging.DEBUG, request, None, f"done with {request.record.tokens} tokens")

    def _log(self, level: int, request: InFlightRequest, node: NodeId | None, message: str) -> None:
        if not logger.isEnabledFor(level):
            return
        extra = {"request": request.id, "attempt": request.record.attempt, "node": node}
        logger.log(level, "%s: %s", node or "-", message, extra=extra)
