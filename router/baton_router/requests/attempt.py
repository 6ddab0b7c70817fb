"""The history of one request: its attempts and its waits for a place.

In: what the state machine (see `state`) notes of each. Out: records that explanations, traces,
headers, logs and metrics read. They contain no tokens or text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import RequestStats
from baton_protocol.store import Exact
from baton_router.nodes.link import Loss
from baton_router.placement.placement import Considered, Placement, PredictionError, Way

# Why a request is placed again: its node was lost, refused it or drains, or its tokens had a gap.
Cause = Loss | Literal["refused", "drained", "gap"]
# How a request ended: with its last token, with an error, or because the client left.
End = Literal["done", "failed", "left"]


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Times measured at the first tokens of an attempt, or at the first ones of its decode node.
    `pause_s`: seconds since the client's previous token. `handoff_s`: seconds since the router sent
    FirstTokens to the decode node. `error`: predicted and measured time until decoding."""

    pause_s: float | None
    handoff_s: float | None
    error: PredictionError | None


@dataclass(frozen=True, slots=True)
class PlacementBasis:
    """Inputs of a placement: the prompt's full chunks, how many of them have a marker, and how
    exact the chosen nodes are together."""

    store_up: bool
    chunks: int
    stored_chunks: int
    exact: Exact


@dataclass(slots=True)
class Wait:
    """One period without a place, and the reason. `until` is None while the request waits."""

    since: float
    why: str
    until: float | None = None


@dataclass(slots=True)
class Attempt:
    """One attempt of a request: a placement and its outcome, predictions beside measurements.
    Times are the router's clock.

    `epoch` is the decode node's. `handed_at`: when the router sent the decode node the first
    tokens. `first_at`: when the client's first token of this attempt arrived. `decoding_at`: when
    the first token of the decoding node arrived, which is the time `placement` predicts.
    `prefill_given_up_at`: when the router told the decode node to compute the prompt. `measured`
    holds the nodes' figures, first those of the node that had to compute the prompt. `ended` is
    also set while the dispatcher looks for another pair, and cleared if the decode node continues.
    """

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
        """The considered option that matches the placement."""
        placement = self.placement
        pair = (placement.decode, placement.prefill)
        return next(
            (option for option in placement.considered if (option.decode, option.prefill) == pair),
            None,
        )

    @property
    def expected_ms(self) -> float:
        """Predicted time until the request decodes, without the slowdown it causes to others if
        that part is known."""
        chosen = self.chosen
        return self.placement.predicted_ms - (chosen.slowdown_ms if chosen is not None else 0.0)

    def note_end(self, why: Cause | End, now: float, blamed: NodeId | None = None) -> None:
        self.ended, self.ended_at = why, now
        self.blamed = blamed or self.blamed

    def give_up_prefill(self, now: float) -> None:
        """Record that the decode node computes the prompt; reopen the attempt if it had ended."""
        self.prefill_given_up_at, self.ended, self.ended_at = now, None, None

    def note_tokens(self, now: float, last_token_at: float | None) -> FirstTokenTimes | None:
        """Record new tokens for the client, whose previous token came at `last_token_at`. Return
        the times if these are the first tokens of the attempt or of its decode node, else None."""
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
