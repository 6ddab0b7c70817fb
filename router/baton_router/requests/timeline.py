"""What happened to one request, as it happens: its waits, its attempts, what each was to take.

In: the dispatcher's words and its clock. Out: attempts with what was predicted beside what was
measured, for `explain` and the metrics. Counts, names and times of ours only; a request that is
placed very often keeps its first attempt and its last ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from baton_protocol.ids import NodeId
from baton_protocol.link import RequestStats
from baton_router.placement.policy import Considered, Placement, PredictionError, Way
from baton_router.requests.actions import Cause

# How a request ended: with its last token, with an error, without its client.
End = Literal["done", "failed", "left"]

MAX_ATTEMPTS = 16
MAX_WAITS = 16


@dataclass(frozen=True, slots=True)
class PlacementBasis:
    """What a placement could rest on: the prompt's full chunks, and those with a marker."""

    store_up: bool
    chunks: int
    stored_chunks: int


@dataclass(slots=True)
class Wait:
    """Times are the dispatcher's, `until` None while it waits."""

    since: float
    why: str
    until: float | None = None


@dataclass(slots=True)
class Attempt:
    """`first_at`: a token came for the client; `decoding_at`: one of the node that decodes, which
    is what `placement` predicts. `alone_at`: the prefill node was given up, and the other did its
    work. `measured` are the nodes' own figures, of whom had to have the prompt first."""

    number: int
    placement: Placement
    known: PlacementBasis
    placed_at: float
    first_at: float | None = None
    decoding_at: float | None = None
    alone_at: float | None = None
    measured: list[tuple[NodeId, RequestStats]] = field(default_factory=list)
    ended_at: float | None = None
    ended: Cause | End | None = None
    blamed: NodeId | None = None

    @property
    def way(self) -> Way:
        return "whole" if self.placement.prefill is None else "split"

    @property
    def chosen(self) -> Considered | None:
        """Its own line among what was weighed."""
        place = self.placement
        pair = (place.decode, place.prefill)
        return next((one for one in place.considered if (one.decode, one.prefill) == pair), None)

    @property
    def expected_ms(self) -> float:
        """Until the request decodes: the prediction without its burden on others, where the two
        are known apart."""
        chosen = self.chosen
        return self.placement.predicted_ms - (chosen.slowdown_ms if chosen is not None else 0.0)


class Timeline:
    """`silent`: the last attempt's decode node has not sent a token. `left_out` attempts were
    forgotten to keep others."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.waits: list[Wait] = []
        self.attempts: list[Attempt] = []
        self.left_out = 0
        self.silent = False
        self.end: End | None = None

    def waiting(self, why: str, now: float) -> None:
        """Said again with other words it is another wait."""
        last = self.waits[-1] if self.waits else None
        if last is not None and last.until is None:
            if last.why == why:
                return
            last.until = now
        if len(self.waits) == MAX_WAITS:
            del self.waits[1]
        self.waits.append(Wait(now, why))

    def placed(self, number: int, placement: Placement, known: PlacementBasis, now: float) -> None:
        self._waited(now)
        if len(self.attempts) == MAX_ATTEMPTS:
            del self.attempts[1]
            self.left_out += 1
        self.attempts.append(Attempt(number, placement, known, now))
        self.silent = True

    def spoke(self, now: float, *, handed: bool) -> PredictionError | None:
        """New tokens of a `silent` attempt. `handed`: the decode node has its prefill node's
        word. Return what its prediction came to, if it has by this."""
        attempt = self.attempts[-1]
        if attempt.first_at is None:
            attempt.first_at = now
        if attempt.way == "split" and attempt.alone_at is None and not handed:
            return None
        self.silent = False
        attempt.decoding_at = now
        if attempt.alone_at is not None:
            return None
        return PredictionError(attempt.way, attempt.expected_ms / 1000, now - attempt.placed_at)

    def alone(self, now: float) -> None:
        """The decode node is to compute the prompt, also where the attempt seemed to be over."""
        attempt = self.attempts[-1]
        attempt.alone_at, attempt.ended, attempt.ended_at = now, None, None
        self.silent = attempt.decoding_at is None

    def told(self, stats: RequestStats) -> None:
        """A node's figures. A prefill node's come first."""
        attempt = self.attempts[-1]
        first = attempt.placement.prefill
        by_prefill = first is not None and attempt.alone_at is None and not attempt.measured
        node = first if by_prefill and first is not None else attempt.placement.decode
        attempt.measured.append((node, stats))

    def lost(self, cause: Cause, now: float, node: NodeId) -> None:
        """The attempt is over, and that node is why."""
        self._end_attempt(cause, now)
        self.attempts[-1].blamed = node

    def over(self, end: End, now: float) -> None:
        self.end = end
        self._waited(now)
        if self.attempts and self.attempts[-1].ended is None:
            self._end_attempt(end, now)

    def _end_attempt(self, why: Cause | End, now: float) -> None:
        self.silent = False
        self.attempts[-1].ended, self.attempts[-1].ended_at = why, now

    def _waited(self, now: float) -> None:
        if self.waits and self.waits[-1].until is None:
            self.waits[-1].until = now
