"""Chooses nodes for a request, books their load and releases the bookings.

In: requests, the pool's view, the store's markers. Out: a placement, or what is missing. Reading
the view, deciding and booking happen without an await in between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from baton_protocol import BEAMS_SINCE, EXTRA_ARGS_SINCE, LOGPROB_IDS_SINCE, STRUCTURED_SINCE
from baton_protocol.ids import BlockHash, Epoch, NodeId
from baton_protocol.store import Exact, Kind, differing, exact_together
from baton_router.nodes.marker_lookup import MarkerLookup
from baton_router.nodes.pool_view import PoolView
from baton_router.placement.costs import RequestFacts
from baton_router.placement.placement import Missing, Placement
from baton_router.placement.policy import PlacementPolicy, place
from baton_router.requests.in_flight import InFlightRequest

Stored = Sequence[bool]
MOST_NAMED = 3  # nodes in a message


class Placer:
    """Places requests on the nodes of one view, by one policy."""

    def __init__(
        self, view: PoolView, markers: MarkerLookup, policy: PlacementPolicy, rng: random.Random
    ) -> None:
        self.view = view
        self._markers = markers
        self.policy = policy
        self._rng = rng
        self._turn = 0  # counts placements, for the round-robin ranking

    async def look_up_chunks(self, kind: Kind, chunks: Sequence[BlockHash]) -> list[bool]:
        """Whether the store holds each of these chunks; all False if its index does not answer."""
        return await self._markers.find_stored(kind.fingerprint, chunks)

    @property
    def store_up(self) -> bool:
        """False if the store's index is known to be down: no chunks can be handed off."""
        return self._markers.up is not False

    def is_reachable(self, node: NodeId) -> bool:
        """Whether the link to the node is up."""
        view = self.view.nodes.get(node)
        return view is not None and view.connected

    def is_served(self, kind: Kind) -> bool:
        """Whether any node of this kind is ready."""
        return next(self.view.ready(kind), None) is not None

    def replacing_revision(self, kind: Kind) -> str:
        """The revision that has replaced all nodes of this kind; "" if one may still come back."""
        return self.view.rolled_out(kind)

    def count_existing_chunks(self, request: InFlightRequest, stored: Stored) -> int:
        """Number of leading chunks of the prompt on one node, plus later ones in the store."""
        held = self.view.chunks.longest(request.prepared.chunks)
        return held + sum(stored[held:])

    def find_placement(
        self, request: InFlightRequest, stored: Stored, now: float
    ) -> Placement | Missing:
        """Choose a place. From its second attempt on, a request may run on a node of any role."""
        record = request.record
        policy = self._policy_of(request)
        sample = next(self.view.ready(request.prepared.kind), None)
        if sample is None:
            return Missing("decode", policy.missing_role)
        # If the whole prompt is computed, cached chunks do not help.
        chunks = () if record.reads_no_cache else request.prepared.chunks
        facts = RequestFacts(
            prompt_tokens=len(record.request.prompt_ids) + record.tokens,
            chunk_tokens=sample.chunk_tokens,
            chunk_bytes=sample.chunk_bytes,
            stored=stored[: len(chunks)],
            sequences=len(record.open),
            store_up=self.store_up,
            resumed=record.tokens > 0,
            prompt_logprobs=record.asks_prompt_logprobs,
            reads_no_cache=record.reads_no_cache,
            pooling=record.request.pooling is not None,
        )
        refused = {node for node, until in request.refused.items() if until > now}
        refused |= self._older_nodes(request)
        groups = self.view.groups(chunks, request.prepared.kind, refused)
        self._turn += 1
        return place(facts, groups["prefill"], groups["decode"], policy, self._rng, self._turn)

    def _older_nodes(self, request: InFlightRequest) -> set[NodeId]:
        """Nodes whose protocol predates a parameter of the request; they would ignore it."""
        _, since = _newest_need(request)
        ready = (view.report for view in self.view.ready(request.prepared.kind)) if since else ()
        return {report.node for report in ready if report.protocol < since}

    def missing_version(self, request: InFlightRequest) -> str:
        """Name the ready nodes whose protocol is too old for the request; "" if none is."""
        older = self._older_nodes(request)
        if not older:
            return ""
        what, since = _newest_need(request)
        return f"; {', '.join(sorted(older))} cannot run it: {what} needs protocol version {since}"

    def of_other_kinds(self, request: InFlightRequest) -> str:
        """Name ready nodes that may not take the request because they are of another kind, and what
        they differ in; "" if there are none."""
        kind, nodes = request.prepared.kind, self.view.nodes.values()
        sample = next((view.report for view in nodes if view.kind == kind), None)
        others = [view.report for view in nodes if view.ready and view.kind != kind]
        if sample is None or not others:
            return ""
        shown = ", ".join(report.node for report in others[:MOST_NAMED])
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        parts = dict.fromkeys(part for report in others for part in differing(report, sample))
        return f"; of another kind: {shown}{more}, which differ in {', '.join(parts)}"

    def _policy_of(self, request: InFlightRequest) -> PlacementPolicy:
        policy, ranking = self.policy, request.prepared.ranking
        if request.record.attempt > 0:
            policy = replace(policy, missing_role="aggregate")
        return replace(policy, ranking=ranking) if ranking is not None else policy

    def book_placement(self, request: InFlightRequest, placement: Placement) -> Epoch:
        """Book the placement and release the previous one. Return the decode node's epoch."""
        self.release_bookings(request)
        sequences = len(request.record.open)
        if placement.prefill is not None:
            self.view.book(placement.prefill, request.id, placement.uncached, 0)
            self.view.book(placement.decode, request.id, 0, sequences)
        else:
            self.view.book(placement.decode, request.id, placement.uncached, sequences)
        return self.view.nodes[placement.decode].report.epoch

    def exactness_of(self, placement: Placement) -> Exact:
        """How exact the nodes of the placement are together."""
        nodes = (placement.decode, placement.prefill)
        return exact_together(self.view.nodes[node].report.exact for node in nodes if node)

    def release_choice(self, request: InFlightRequest) -> None:
        """Release the booking of one finished choice; the other choices go on."""
        if request.record.decode is not None:
            self.view.sequence_ended(request.record.decode, request.id)

    def release_bookings(self, request: InFlightRequest) -> None:
        """Release the bookings of the last attempt that still exist."""
        if request.record.attempts:
            placement = request.record.attempts[-1].placement
            self.view.release(placement.decode, request.id)
            if placement.prefill is not None:
                self.view.release(placement.prefill, request.id)


def _newest_need(request: InFlightRequest) -> tuple[str, int]:
    """The parameter that needs the newest protocol, and its version; 0 if every node knows all."""
    params = request.record.request.params
    if params.logprob_token_ids:
        return "logprob_token_ids", LOGPROB_IDS_SINCE
    if params.use_beam_search:
        return "beam search", BEAMS_SINCE
    if params.extra_args:
        return "vllm_xargs", EXTRA_ARGS_SINCE
    if params.structured is not None:
        return "structured output", STRUCTURED_SINCE
    return "", 0
