"""Carries requests: from a placement to jobs on links, from frames to outboxes, and on to another
place when a node is lost.

In: prepared requests that admission let in; what nodes answer; nodes lost and resumed. Out: deltas
in the call's outbox, frames to nodes. Finding a place, booking it and queueing the jobs is one act
without an await. A request without a place waits in a task of its own, which ends with it: it looks
again whenever the pool has changed.

A request stays with its kind of nodes once its client has anything of it; before, it goes over to
the kind that is served, where its own is no more. What cannot, and whose kind a roll-out has taken
away for good, ends with the error `rolled_out`.

A request that may be killing its nodes (see `state`) is on probation: of these only one has
a place at a time, so that the guilty one takes none of the others with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from baton_protocol.errors import ErrorRecord, InternalError, Unavailable
from baton_protocol.ids import NodeId, RequestId
from baton_protocol.link import (
    Delta,
    Deltas,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PrefillDone,
    PrefillJob,
    RunJob,
    ToNode,
)
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.link import Loss
from baton_router.placement.policy import Missing, Placement
from baton_router.requests.actions import (
    Action,
    Emit,
    Ended,
    Failed,
    Measured,
    Regroup,
    Replace,
    Send,
)
from baton_router.requests.in_flight import InFlightRequest, Prepared, Ticket, rolled_out
from baton_router.requests.output_queue import OutputQueue
from baton_router.requests.placer import Placer, Stored
from baton_router.requests.state import RequestRecord
from baton_router.requests.timeline import End, PlacementBasis, Timeline
from baton_router.requests.tokenize import fits, renamed

__all__ = ["Dispatcher", "InFlightRequest", "Prepared"]

logger = logging.getLogger(__name__)


def _timed(frame: ToNode, flight: InFlightRequest, now: float) -> ToNode:
    """A job says how much time is left as it is sent: each attempt has less."""
    deadline = flight.prepared.deadline
    if deadline is None or not isinstance(frame, PrefillJob | RunJob):
        return frame
    request = msgspec.structs.replace(frame.request, time_left=max(0.0, deadline - now))
    return msgspec.structs.replace(frame, request=request)


class Dispatcher:
    """A RequestListener. `flights` are the requests that are not over. A node that refused a
    request is not asked again for `refused_s`."""

    def __init__(
        self,
        fleet: Fleet,
        places: Placer,
        metrics: RouterMetrics,
        *,
        unready_wait_s: float,
        refused_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._places = places
        self._metrics = metrics
        self._unready_wait_s = unready_wait_s
        self._refused_s = refused_s
        self._clock = clock
        self._change = asyncio.Event()
        self._suspect: RequestId | None = None  # whoever is on probation and has a place
        self.flights: dict[RequestId, InFlightRequest] = {}

    async def start(
        self,
        entered: Sequence[tuple[Prepared, Ticket]],
        outbox: OutputQueue,
        first_slot: int = 0,
        waits_until: float | None = None,
    ) -> list[InFlightRequest]:
        """Give each of these requests of one call a place, or let it wait for one, `waits_until` in
        any case where that is said. Their places in the outbox begin with `first_slot`. Raise
        Unavailable where a place is not to be waited for; then all tickets are over."""
        flights: list[InFlightRequest] = []
        try:
            chunks = [name for item, _ in entered for name in item.chunks]
            stored = await self._places.stored(entered[0][0].kind, chunks)
            at = 0
            if waits_until is None:
                fails = self._places.policy.missing_role == "fail"
                waits_until = self._clock() + (0.0 if fails else self._unready_wait_s)
            for slot, (item, ticket) in enumerate(entered, first_slot):
                held = stored[at : at + len(item.chunks)]
                at += len(item.chunks)
                record, story = RequestRecord(item.request), Timeline(self._clock())
                flight = InFlightRequest(record, item, ticket, outbox, slot, waits_until, story)
                flights.append(flight)
                self._launch(flight, held)
                ticket.placed()
        except BaseException:
            for flight in flights:
                self.cancel(flight)
            for _, ticket in entered:
                ticket.over()
            raise
        return flights

    def cancel(self, flight: InFlightRequest, error: ErrorRecord | None = None) -> None:
        """End a request everywhere; no effect on one that is over."""
        self._apply(flight, flight.record.cancel(error))
        self._close(flight, "left")

    # --- what nodes say ---------------------------------------------------------------------------

    def on_deltas(self, node: NodeId, frame: Deltas) -> None:
        now = self._clock()
        for delta in frame.items:
            flight = self.flights.get(delta.request)
            if flight is None:
                continue
            if flight.flows and flight.record.adds(node, delta):
                flight.outbox.put(flight.slot, delta)
                flight.token_at = now
            else:
                if delta.attempt == flight.record.attempt:
                    self._places.view.prefilled(node, flight.id)
                self._apply(flight, flight.record.on_delta(node, delta))

    def on_prefill_done(self, node: NodeId, frame: PrefillDone) -> None:
        flight = self.flights.get(frame.request)
        if flight is not None and flight.record.prefill == node:
            actions = flight.record.on_prefill_done(node, frame)
            if actions:
                self._places.view.release(node, flight.id)
                self._apply(flight, actions)

    def on_failed(self, node: NodeId, frame: JobFailed) -> None:
        flight = self.flights.get(frame.request)
        actions = flight.record.on_failed(node, frame) if flight is not None else []
        if flight is not None and actions:
            self._log(logging.WARNING, flight, node, f"job failed: {frame.error.message}")
            self._places.view.release(node, flight.id)
            self._apply(flight, actions)

    def on_lost(self, node: NodeId, cause: Loss, alive_at: float) -> None:
        for flight in self._on(node):
            blamed = flight.placed_at <= alive_at
            try:
                self._apply(flight, flight.record.on_lost(node, cause, blamed=blamed))
            except Exception:  # our bug; the others that the node served are placed again
                self._broke(flight)

    def on_resumed(self, node: NodeId) -> None:
        for flight in self._on(node):
            self._log(logging.INFO, flight, node, "goes on: the link is back")
            self._apply(flight, flight.record.on_resumed(node))

    def on_leaving(self, node: NodeId) -> None:
        for flight in self._on(node):
            if flight.task is not None and not flight.task.done():
                continue  # its place is looked for already
            if actions := flight.record.on_leaving(node):
                self._apply(flight, actions)
            elif self._places.served(flight.prepared.kind):
                self._spawn(flight, partial(self._move, flight, node))
            elif self._places.rolled_out(flight.prepared.kind):
                self._apply(flight, flight.record.on_rolled_out(node))

    def change(self) -> asyncio.Event:
        """Set when the pool has changed next."""
        return self._change

    def on_change(self) -> None:
        """Wake who waits for a place."""
        self._change.set()
        self._change = asyncio.Event()

    # --- places -----------------------------------------------------------------------------------

    def _launch(self, flight: InFlightRequest, stored: Stored) -> None:
        self.flights[flight.id] = flight
        if self._seat(flight, stored):
            return
        superseded = self._fleet.superseded(flight.prepared.kind)
        if self._clock() >= flight.give_up_at and not superseded:
            raise self._unavailable(flight)
        self._spawn(flight, partial(self._wait, flight))

    def _seat(self, flight: InFlightRequest, stored: Stored) -> bool:
        """Place, book and send, or end the request. False where it has to wait."""
        record = flight.record
        verdict = record.judge(self._places.existing(flight, stored))
        if verdict:
            self._apply(flight, verdict)
            return True
        if record.on_probation and self._suspect is not None:
            flight.wait("its nodes were lost; requests like it run one at a time", self._clock())
            return False
        found = self._places.find(flight, stored, self._clock())
        if isinstance(found, Missing):
            why = f"{found.explanation} (nodes: {self._places.view.states() or 'none'})"
            flight.wait(why, self._clock())
            return False
        self._take(flight, found, stored)
        return True

    def _take(self, flight: InFlightRequest, placement: Placement, stored: Stored) -> None:
        record = flight.record
        known = PlacementBasis(self._places.store_up, len(flight.prepared.chunks), sum(stored))
        epoch = self._places.take(flight, placement)
        if record.on_probation:
            self._suspect = flight.id
        flight.placed_at = self._clock()
        self._metrics.placed(placement, flight.cause, record.tokens)
        findable = len(record.request.prompt_ids) - placement.uncached
        actions = record.placed(placement.decode, epoch, placement.prefill, findable)
        flight.story.placed(record.attempt, placement, known, flight.placed_at)
        self._log(logging.DEBUG, flight, placement.decode, f"placed: {placement.line()}")
        self._apply(flight, actions)

    async def _wait(self, flight: InFlightRequest) -> None:
        """Until the request has a place, or is over."""
        record = flight.record
        while record.phase == "waiting":
            change = self._change  # taken before looking: what changes meanwhile is not missed
            item = flight.prepared
            stored = await self._places.stored(item.kind, item.chunks)
            now = self._clock()  # before looking, too
            if self._seat(flight, stored):
                return
            if await self._inherited(flight):
                continue
            if revision := self._places.rolled_out(item.kind):
                self.cancel(flight, rolled_out(revision).record())
                return
            limits = [until for until in flight.refused.values() if until > now]
            if record.attempt == 0:
                limits.append(flight.give_up_at)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(limits) - now if limits else None):
                    await change.wait()
            if record.attempt == 0 and self._clock() >= flight.give_up_at:
                self.cancel(flight, self._unavailable(flight).record())

    async def _inherited(self, flight: InFlightRequest) -> bool:
        """As long as its client has nothing, the kind that is served now may do it."""
        item, record = flight.prepared, flight.record
        fitting = partial(fits, item)
        heir = self._fleet.heir(item.kind, item.wanted, fitting) if record.untold else None
        if heir is None:
            return False
        flight.prepared = await renamed(item, heir)
        record.request = flight.prepared.request
        told = f"goes over to what {heir.sample.revision or 'another kind of nodes'} serves"
        self._log(logging.INFO, flight, None, told)
        return True

    async def _move(self, flight: InFlightRequest, leaving: NodeId) -> None:
        """To another node, with the tokens that its client has by then. Where none can take it, it
        goes on where it is: the node's next load asks again."""
        item = flight.prepared
        stored = await self._places.stored(item.kind, item.chunks)
        found = self._places.find(flight, stored, self._clock())
        if isinstance(found, Missing) or leaving in (found.decode, found.prefill):
            return
        self._lost(flight, Replace("drained", leaving))
        self._take(flight, found, stored)

    async def _regroup(self, flight: InFlightRequest, lost: NodeId) -> None:
        """Find another pair for a request whose prefill node is gone, or leave it to its decode
        node. Whatever else happens to the request meanwhile ends this task."""
        record, item = flight.record, flight.prepared
        stored = await self._places.stored(item.kind, item.chunks)
        verdict = record.judge(self._places.existing(flight, stored))
        if verdict:
            self._apply(flight, verdict)
            return
        found = self._places.find(flight, stored, self._clock())
        if isinstance(found, Placement) and found.prefill is not None:
            self._take(flight, found, stored)
        elif record.decode is not None and not self._places.reachable(record.decode):
            self._apply(flight, record.on_lost(record.decode, "link"))  # both went at once
        else:
            self._apply(flight, record.no_first(f"prefill node {lost} is gone"))

    def _unavailable(self, flight: InFlightRequest) -> Unavailable:
        return Unavailable(f"no request can be served now: {flight.waits}")

    # --- one request ------------------------------------------------------------------------------

    def _on(self, node: NodeId) -> Iterator[InFlightRequest]:
        """The requests that this node serves."""
        for flight in list(self.flights.values()):
            if node in (flight.record.decode, flight.record.prefill):
                yield flight

    def _apply(self, flight: InFlightRequest, actions: Sequence[Action]) -> None:
        now = self._clock()  # the jobs of one placement say the same time left
        for action in actions:
            match action:
                case Emit():
                    self._emit(flight, action.delta)
                case Send():
                    self._fleet.send(action.node, _timed(action.frame, flight, now))
                    if isinstance(action.frame, FirstTokens):
                        flight.first_at = self._clock()
                    elif isinstance(action.frame, NoFirstTokens):
                        flight.story.alone(self._clock())
                case Measured():
                    self._metrics.measured(action.stats, action.attempt, opening=action.opening)
                    flight.story.told(action.stats)
                case Replace():
                    self._lost(flight, action)
                    self._places.leave(flight)
                    flight.placement = None
                    why = f"its attempt on {action.node} ended ({action.cause})"
                    flight.wait(why, self._clock())
                    self._acquit(flight)
                    self._spawn(flight, partial(self._wait, flight))
                case Regroup():
                    self._lost(flight, action)
                    self._places.view.release(action.node, flight.id)
                    self._spawn(flight, partial(self._regroup, flight, action.node))
                case Failed():
                    self._close(flight, "failed")
                    flight.outbox.fail(action.error)
                case Ended():
                    self._close(flight, "done")
                    flight.outbox.end()

    def _emit(self, flight: InFlightRequest, delta: Delta) -> None:
        flight.outbox.put(flight.slot, delta)
        if delta.finish is not None and flight.record.open:  # else all of it is over next
            flight.ticket.ended(1)
            self._places.choice_ended(flight)
        if not delta.ids:
            return
        now = self._clock()
        if flight.story.silent:
            miss = flight.story.spoke(now, handed=flight.first_at is not None)
            if miss is not None:
                self._metrics.missed(miss)
        if flight.paused_at is not None:
            self._metrics.pause.observe(now - flight.paused_at)
            flight.paused_at = None
        if flight.first_at is not None:
            self._metrics.handoff.observe(now - flight.first_at)
            flight.first_at = None
        flight.token_at = now
        self._acquit(flight)

    def _lost(self, flight: InFlightRequest, lost: Replace | Regroup) -> None:
        flight.cause = lost.cause
        flight.story.lost(lost.cause, self._clock(), lost.node)
        flight.first_at = None
        if flight.paused_at is None:
            flight.paused_at = flight.token_at
        if lost.cause == "refused":
            flight.refused[lost.node] = self._clock() + self._refused_s
        told = f"lost ({lost.cause}) with {flight.record.tokens} tokens; it looks for another place"
        level = logging.INFO if lost.cause == "drained" else logging.WARNING
        self._log(level, flight, lost.node, told)

    def _acquit(self, flight: InFlightRequest) -> None:
        """It has no place, or is not on probation any more: the next one may have its turn."""
        if self._suspect != flight.id:
            return
        placed = flight.placement is not None and flight.id in self.flights
        if not (placed and flight.record.on_probation):
            self._suspect = None
            self.on_change()

    def _spawn(self, flight: InFlightRequest, work: Callable[[], Awaitable[None]]) -> None:
        """In place of the task that the flight has."""
        self._cease(flight)
        flight.task = asyncio.create_task(self._guarded(flight, work))

    async def _guarded(self, flight: InFlightRequest, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            self._broke(flight)

    def _broke(self, flight: InFlightRequest) -> None:
        logger.exception("the request could not be placed", extra={"request": flight.id})
        told = InternalError(f"the router failed; its log says why, under {flight.id}")
        self.cancel(flight, told.record())

    def _cease(self, flight: InFlightRequest) -> None:
        if flight.task is not None and flight.task is not asyncio.current_task():
            flight.task.cancel()
        flight.task = None

    def _close(self, flight: InFlightRequest, end: End) -> None:
        if self.flights.pop(flight.id, None) is None:
            return
        flight.story.over(end, self._clock())
        self._cease(flight)
        flight.ticket.over()
        self._places.leave(flight)
        self._acquit(flight)
        self._log(logging.DEBUG, flight, None, f"done with {flight.record.tokens} tokens")

    def _log(self, level: int, flight: InFlightRequest, node: NodeId | None, told: str) -> None:
        extra = {"request": flight.id, "attempt": flight.record.attempt, "node": node}
        logger.log(level, "%s: %s", node or "-", told, extra=extra)
