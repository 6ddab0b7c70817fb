"""One attempt of a request: a placement, and what came of it.

In: the placement, and what its record says as it happens. Out: what was predicted beside what was
measured. A request's record keeps its attempts; explanations, traces, headers, logs and metrics
are read from them. Counts, names and times of ours only; times are the router's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import RequestStats
from baton_router.nodes.link import Loss
from baton_router.placement.policy import Considered, Placement, PredictionError, Way

# Why a request is placed again: its node is lost, refused it, or drains, or its tokens had a gap.
Cause = Loss | Literal["refused", "drained", "gap"]
# How a request ended: with its last token, with an error, without its client.
End = Literal["done", "failed", "left"]


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """What the first tokens of an attempt show, or the first ones of its decode node. `pause_s`:
    since the client's last token before. `handoff_s`: since the decode node got the first tokens.
    `error`: the placement's prediction, and what it came to."""

    pause_s: float | None
    handoff_s: float | None
    error: PredictionError | None


@dataclass(frozen=True, slots=True)
class PlacementBasis:
    """What a placement could rest on: the prompt's full chunks, and those with a marker."""

    store_up: bool
    chunks: int
    stored_chunks: int


@dataclass(slots=True)
class Wait:
    """A request had no place, and why. `until` is None while it waits."""

    since: float
    why: str
    until: float | None = None


@dataclass(slots=True)
class Attempt:
    """`epoch` is the decode node's. `handed_at`: the decode node was sent the first tokens.
    `first_at`: a token came for the client; `decoding_at`: one of the node that decodes, which is
    what `placement` predicts. `prefill_given_up_at`: the decode node was told to compute the prompt
    itself. `measured` are the nodes' own figures, of whom had to have the prompt first. `ended` is
    also set while another pair is looked for, and None again where the decode node goes on."""

    number: int
    placement: Placement
    epoch: Epoch
    basis: PlacementBasis
    placed_at: float
    handed_at: float | None = None
    first_at: float | None = None
    decoding_at: float | None = None
    prefill_given_up_at: float | None = None
    measured: list[tuple[NodeId, RequestStats]] = field(default_factory=list)
    ended_at: float | None = None
    ended: Cause | End | None = None
    blamed: NodeId | None = None

    @property
    def way(self) -> Way:
        return "whole" if self.placement.prefill is None else "split"

    @property
    def chosen(self) -> Considered | None:
        """The way that was taken, among those that were weighed."""
        place = self.placement
        pair = (place.decode, place.prefill)
        return next((one for one in place.considered if (one.decode, one.prefill) == pair), None)

    @property
    def expected_ms(self) -> float:
        """Until the request decodes: the prediction without its burden on others, where the two
        are known apart."""
        chosen = self.chosen
        return self.placement.predicted_ms - (chosen.slowdown_ms if chosen is not None else 0.0)

    def end(self, why: Cause | End, now: float, blamed: NodeId | None = None) -> None:
        self.ended, self.ended_at = why, now
        self.blamed = blamed or self.blamed

    def give_up_prefill(self, now: float) -> None:
        """The decode node computes the prompt, also where the attempt seemed to be over."""
        self.prefill_given_up_at, self.ended, self.ended_at = now, None, None

    def note_tokens(self, now: float, last_token_at: float | None) -> FirstTokenTimes | None:
        """New tokens came for the client, who got the last one before at that time. Return what
        the first ones of the attempt show, or the first ones of its decode node."""
        pause_s = handoff_s = error = None
        if self.first_at is None:
            self.first_at = now
            pause_s = None if last_token_at is None else now - last_token_at
        if self.decoding_at is None and not self._tokens_are_the_prefill_nodes():
            self.decoding_at = now
            handoff_s = None if self.handed_at is None else now - self.handed_at
            if self.prefill_given_up_at is None:
                took_s = now - self.placed_at
                error = PredictionError(self.way, self.expected_ms / 1000, took_s)
        if (pause_s, handoff_s, error) == (None, None, None):
            return None
        return FirstTokenTimes(pause_s, handoff_s, error)

    def _tokens_are_the_prefill_nodes(self) -> bool:
        return self.way == "split" and self.prefill_given_up_at is None and self.handed_at is None
