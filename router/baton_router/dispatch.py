"""Places requests and carries them: from a placement to jobs on links, from frames to outboxes.

In: prepared requests of one HTTP call; what nodes answer. Out: deltas in the call's outbox, frames
to nodes. Between reading the view, deciding, booking and queueing the jobs nothing is awaited.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton_protocol.errors import ErrorRecord, Unavailable
from baton_protocol.ids import BlockHash, NodeId, RequestId
from baton_protocol.link import Deltas, JobFailed, PrefillDone
from baton_protocol.request import Request
from baton_router.fleet import Fleet
from baton_router.markers import Markers
from baton_router.outbox import Outbox
from baton_router.ownership import Action, Emit, Failed, RequestRecord, Send
from baton_router.placement import Placement, Policy, place
from baton_router.prices import Facts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is tokenized and hashed. `chunks` name its full chunks."""

    request: Request
    chunks: tuple[BlockHash, ...]


@dataclass(slots=True)
class Flight:
    """One request on its way. `slot` is its place in the outbox."""

    record: RequestRecord
    placement: Placement
    outbox: Outbox
    slot: int

    @property
    def id(self) -> RequestId:
        return self.record.request.id


class Dispatcher:
    """A RequestListener. `placed` hears of each placement (metrics)."""

    def __init__(
        self,
        fleet: Fleet,
        markers: Markers,
        policy: Policy,
        rng: random.Random,
        placed: Callable[[Placement], None] = lambda placement: None,
    ) -> None:
        self._fleet = fleet
        self._markers = markers
        self._policy = policy
        self._rng = rng
        self._placed = placed
        self.flights: dict[RequestId, Flight] = {}

    async def start(self, prepared: Sequence[Prepared], outbox: Outbox) -> list[Flight]:
        """Place and send all requests of one call. Raise Unavailable where no node is ready."""
        kind = self._fleet.view.kind()
        chunks = [name for item in prepared for name in item.chunks]
        stored = await self._markers.stored(kind.fingerprint, chunks) if kind and chunks else []
        flights: list[Flight] = []
        at = 0
        try:
            for slot, item in enumerate(prepared):
                held = tuple(stored[at : at + len(item.chunks)])
                at += len(item.chunks)
                flights.append(self._launch(item, held, outbox, slot))
        except BaseException:
            for flight in flights:
                self.cancel(flight)
            raise
        return flights

    def cancel(self, flight: Flight, error: ErrorRecord | None = None) -> None:
        """End a request everywhere; no effect on one that is over."""
        self._apply(flight, flight.record.cancel(error))
        if error is None:
            self._close(flight)

    # --- what nodes say ---------------------------------------------------------------------------

    def on_deltas(self, node: NodeId, frame: Deltas) -> None:
        for delta in frame.items:
            flight = self.flights.get(delta.request)
            if flight is not None:
                self._fleet.view.prefilled(node, flight.id)
                self._apply(flight, flight.record.on_delta(node, delta))

    def on_prefill_done(self, node: NodeId, frame: PrefillDone) -> None:
        flight = self.flights.get(frame.request)
        if flight is not None:
            self._fleet.view.release(node, flight.id)
            self._apply(flight, flight.record.on_prefill_done(node, frame))

    def on_failed(self, node: NodeId, frame: JobFailed) -> None:
        flight = self.flights.get(frame.request)
        if flight is not None:
            logger.warning("%s failed on %s: %s", flight.id, node, frame.error.message)
            self._fleet.view.release(node, flight.id)
            self._apply(flight, flight.record.on_failed(node, frame))

    def on_lost(self, node: NodeId) -> None:
        view = self._fleet.view.nodes.get(node)
        for request in list(view.booked) if view is not None else ():
            flight = self.flights.get(request)
            self._fleet.view.release(node, request)
            if flight is not None:
                self._apply(flight, flight.record.on_link_lost(node))

    # --- one request ------------------------------------------------------------------------------

    def _launch(
        self, item: Prepared, stored: tuple[bool, ...], outbox: Outbox, slot: int
    ) -> Flight:
        view = self._fleet.view
        request = item.request
        candidates = view.candidates(item.chunks)
        sample = next(view.ready(), None)
        if sample is None:
            raise Unavailable(f"no request can be served now: {view.why_not_ready()}")
        layout = sample.report.layout
        facts = Facts(
            prompt_tokens=len(request.prompt_ids),
            chunk_tokens=layout.chunk_tokens,
            chunk_bytes=layout.chunk_bytes,
            stored=stored,
            sequences=request.params.n,
            store_up=self._markers.up is not False,
        )
        placement = place(facts, candidates, self._policy, self._rng)
        if placement is None:
            raise Unavailable(f"no request can be served now: {view.why_not_ready()}")
        flight = Flight(
            RequestRecord(request, placement.decode, placement.prefill), placement, outbox, slot
        )
        if placement.prefill is not None:
            view.book(placement.prefill, request.id, placement.uncached, 0)
            view.book(placement.decode, request.id, 0, request.params.n)
        else:
            view.book(placement.decode, request.id, placement.uncached, request.params.n)
        self.flights[request.id] = flight
        epoch = view.nodes[placement.decode].report.epoch
        self._apply(flight, flight.record.opening(epoch))
        self._placed(placement)
        return flight

    def _apply(self, flight: Flight, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Emit):
                flight.outbox.put(flight.slot, action.delta)
            elif isinstance(action, Send):
                self._fleet.send(action.node, action.frame)
            else:
                self._close(flight)
                if isinstance(action, Failed):
                    flight.outbox.fail(action.error)
                else:
                    flight.outbox.end()

    def _close(self, flight: Flight) -> None:
        self.flights.pop(flight.id, None)
        record = flight.record
        self._fleet.view.release(record.decode, flight.id)
        if record.prefill is not None:
            self._fleet.view.release(record.prefill, flight.id)
