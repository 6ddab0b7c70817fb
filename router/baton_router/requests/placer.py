"""Finds a place for a request and books it; the bookings end here too.

In: requests, the pool's view, the store's markers. Out: placements, or what is missing. Between
reading the view, deciding and booking nothing is awaited.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from baton_protocol.ids import BlockHash, Epoch, NodeId
from baton_protocol.store import Kind
from baton_router.nodes.pool_view import PoolView
from baton_router.nodes.store_lookup import Markers
from baton_router.placement.cost import RequestFacts
from baton_router.placement.policy import Missing, Placement, Policy, place
from baton_router.requests.in_flight import InFlightRequest

Stored = Sequence[bool]


class Placer:
    def __init__(
        self, view: PoolView, markers: Markers, policy: Policy, rng: random.Random
    ) -> None:
        self.view = view
        self._markers = markers
        self.policy = policy
        self._rng = rng
        self._turn = 0  # for placements in turns

    async def stored(self, kind: Kind, chunks: Sequence[BlockHash]) -> list[bool]:
        """Which of these chunks the store holds; all False where its index is silent."""
        return await self._markers.stored(kind.fingerprint, chunks)

    @property
    def store_up(self) -> bool:
        """Whether chunks can be handed over, as far as is known."""
        return self._markers.up is not False

    def reachable(self, node: NodeId) -> bool:
        """Whether its link is up."""
        view = self.view.nodes.get(node)
        return view is not None and view.connected

    def served(self, kind: Kind) -> bool:
        """Whether any node is ready for requests of that kind."""
        return next(self.view.ready(kind), None) is not None

    def rolled_out(self, kind: Kind) -> str:
        """The revision in whose favour all its nodes have gone; "" while one may come back."""
        return self.view.rolled_out(kind)

    def existing(self, request: InFlightRequest, stored: Stored) -> int:
        """How many of the prompt's chunks exist somewhere."""
        held = self.view.chunks.longest(request.prepared.chunks)
        return held + sum(stored[held:])

    def find(self, request: InFlightRequest, stored: Stored, now: float) -> Placement | Missing:
        """What was accepted is finished: once placed, any role may run it."""
        record = request.record
        policy = self._policy_of(request)
        sample = next(self.view.ready(request.prepared.kind), None)
        if sample is None:
            return Missing("decode", policy.missing_role)
        # Whoever asks for the prompt's logprobs has all of it computed.
        chunks = () if record.asks_prompt_logprobs else request.prepared.chunks
        facts = RequestFacts(
            prompt_tokens=len(record.request.prompt_ids) + record.tokens,
            chunk_tokens=sample.report.layout.chunk_tokens,
            chunk_bytes=sample.report.layout.chunk_bytes,
            stored=stored[: len(chunks)],
            sequences=len(record.open),
            store_up=self.store_up,
            resumed=record.tokens > 0,
            prompt_logprobs=record.asks_prompt_logprobs,
        )
        refused = {node for node, until in request.refused.items() if until > now}
        groups = self.view.groups(chunks, request.prepared.kind, refused)
        self._turn += 1
        return place(facts, groups["prefill"], groups["decode"], policy, self._rng, self._turn)

    def _policy_of(self, request: InFlightRequest) -> Policy:
        policy, own = self.policy, request.prepared.ranking
        if request.record.attempt > 0:
            policy = replace(policy, missing_role="aggregate")
        return replace(policy, ranking=own) if own is not None else policy

    def take(self, request: InFlightRequest, placement: Placement) -> Epoch:
        """Book it, instead of the place it had. Return the decode node's epoch."""
        self.leave(request)
        sequences = len(request.record.open)
        if placement.prefill is not None:
            self.view.book(placement.prefill, request.id, placement.uncached, 0)
            self.view.book(placement.decode, request.id, 0, sequences)
        else:
            self.view.book(placement.decode, request.id, placement.uncached, sequences)
        return self.view.nodes[placement.decode].report.epoch

    def choice_ended(self, request: InFlightRequest) -> None:
        """Its other choices go on."""
        if request.record.decode is not None:
            self.view.sequence_ended(request.record.decode, request.id)

    def leave(self, request: InFlightRequest) -> None:
        """End the bookings of its last attempt, as far as they have not ended."""
        if request.record.attempts:
            placement = request.record.attempts[-1].placement
            self.view.release(placement.decode, request.id)
            if placement.prefill is not None:
                self.view.release(placement.prefill, request.id)
