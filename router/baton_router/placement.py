"""Where a request runs: a pure function from its facts and the candidates to a Placement.

A cost is predicted milliseconds (see `prices`). The lowest wins; costs within measuring noise are a
tie, and ties are broken at random, so that idle nodes share the work. Every placement says why.
Where nobody may run it, what is Missing says so: its owner waits, or refuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from baton_protocol.ids import NodeId
from baton_protocol.store import Role
from baton_router.prices import Candidate, Facts, Prices, with_fallbacks
from baton_router.settings import Handoff, MissingRole

T = TypeVar("T")
Reason = Literal[
    "split",
    "always",
    "never",
    "short",
    "costly",
    "no_prefill",
    "no_decode",
    "store_down",
    "resumed",
    "prompt_logprobs",
]

# Predictions nearer to each other than this are a tie: measured speeds are not better than that.
TIE_SHARE = 0.02
TIE_MS = 0.1
# Pairs are searched in full up to this many nodes of each role, then among the best by themselves.
PAIRED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`auto` splits what has at least `min_tokens` uncached, unless that is predicted to cost more
    than the decode node alone by `slack_ms` and `slack_share` of its cost. `missing_role`: whether
    the other role does a request whose own has no ready node."""

    handoff: Handoff = "auto"
    min_tokens: int = 128
    slack_ms: float = 20.0
    slack_share: float = 0.1
    missing_role: MissingRole = "aggregate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One way that was weighed. `predicted_ms` is the sum of what it is made of, milliseconds each:
    the queue ahead, computing what is uncached, fetching what outlasts that, and what it takes from
    sequences that decode there already."""

    decode: NodeId
    prefill: NodeId | None
    predicted_ms: float
    queue_ms: float
    compute_ms: float
    fetch_ms: float
    slowdown_ms: float
    cached_tokens: int
    uncached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`uncached` prompt tokens are to be computed; they are what is booked, on the prefill node if
    there is one. `predicted_ms`: until the request decodes, its burden on others included.
    `considered` are the best ways that were weighed, the cheapest first."""

    decode: NodeId
    prefill: NodeId | None
    reason: Reason
    explanation: str
    predicted_ms: float
    uncached: int
    considered: tuple[Considered, ...] = ()

    def line(self) -> str:
        """The value of x-baton-placement."""
        prefill = self.prefill or "-"
        return f"prefill={prefill} decode={self.decode} reason={self.reason}: {self.explanation}"


@dataclass(frozen=True, slots=True)
class Missing:
    """No ready node of this role, and none of the other may stand in for it."""

    role: Role
    policy: MissingRole

    @property
    def explanation(self) -> str:
        if self.policy == "aggregate":
            return "no node is ready"
        return f"no {self.role} node is ready, and missing_role is {self.policy}"


@dataclass(frozen=True, slots=True)
class _Best:
    """The cheapest way of one kind."""

    cost: float
    decode: Candidate
    prefill: Candidate | None = None


def place(
    facts: Facts, candidates: Sequence[Candidate], policy: Policy, rng: random.Random
) -> Placement | Missing:
    """Choose among nodes that are all ready and of one kind."""
    nodes = with_fallbacks(candidates)
    prefills = [node for node in nodes if node.role == "prefill"]
    decodes = [node for node in nodes if node.role == "decode"]
    chooser = _Chooser(Prices(facts), rng)
    if not decodes:
        if not prefills or policy.missing_role != "aggregate":
            return Missing("decode", policy.missing_role)
        return chooser.placed(chooser.whole(prefills), "no_decode", "no ready decode node")
    whole = chooser.whole(decodes)
    if facts.prompt_logprobs:
        return chooser.placed(whole, "prompt_logprobs", "one node computes the whole prompt")
    if facts.resumed:
        return chooser.placed(whole, "resumed", "its client has tokens already")
    if policy.handoff == "never":
        return chooser.placed(whole, "never", "hand-off is off")
    return _with_prefill(chooser, whole, prefills, decodes, policy)


def _with_prefill(
    chooser: _Chooser,
    whole: _Best,
    prefills: list[Candidate],
    decodes: list[Candidate],
    policy: Policy,
) -> Placement | Missing:
    """Of a request that may be split."""
    publishing = [node for node in prefills if node.store == "up"]
    fetching = [node for node in decodes if node.store == "up"]
    store_up = chooser.prices.facts.store_up and bool(fetching)
    long = policy.handoff == "always" or chooser.prices.uncached(whole.decode) >= policy.min_tokens
    if not prefills:
        if policy.missing_role != "aggregate" and store_up and long:
            return Missing("prefill", policy.missing_role)
        return chooser.placed(whole, "no_prefill", "no ready prefill node")
    if not chooser.prices.facts.store_up:
        return chooser.placed(whole, "store_down", "the store's index does not answer")
    if not publishing or not fetching:
        return chooser.placed(whole, "store_down", "no two nodes that both reach the store")
    if not long:
        return chooser.placed(whole, "short", f"hand-off begins at {policy.min_tokens}")
    split = chooser.split(publishing, fetching)
    if policy.handoff == "always":
        return chooser.placed(split, "always", "hand-off is always on")
    if split.cost <= whole.cost * (1 + policy.slack_share) + policy.slack_ms:
        return chooser.placed(split, "split", f"decode node alone {whole.cost:.1f} ms")
    return chooser.placed(whole, "costly", f"hand-off {split.cost:.1f} ms")


class _Chooser:
    def __init__(self, prices: Prices, rng: random.Random) -> None:
        self.prices = prices
        self._rng = rng

    def whole(self, nodes: list[Candidate]) -> _Best:
        cost, node = self._lowest([(self.prices.alone_ms(node), node) for node in nodes])
        return _Best(cost, node)

    def split(self, prefills: list[Candidate], decodes: list[Candidate]) -> _Best:
        priced = [
            (self.prices.split_ms(prefill, decode), (prefill, decode))
            for prefill in _few(prefills, self.prices.prefill_ms)
            for decode in _few(decodes, self.prices.join_ms)
        ]
        cost, (prefill, decode) = self._lowest(priced)
        return _Best(cost, decode, prefill)

    def placed(self, best: _Best, reason: Reason, why: str) -> Placement:
        closes = best.prefill or best.decode
        uncached, fetchable = self.prices.uncached(closes), self.prices.fetchable(closes)
        total = self.prices.facts.prompt_tokens
        store = f"; {fetchable}" if fetchable.chunks else ""
        return Placement(
            decode=best.decode.node,
            prefill=best.prefill.node if best.prefill else None,
            reason=reason,
            explanation=f"uncached {uncached} of {total} tokens, {best.cost:.1f} ms{store}; {why}",
            predicted_ms=best.cost,
            uncached=uncached,
        )

    def _lowest(self, priced: list[tuple[float, T]]) -> tuple[float, T]:
        limit = min(cost for cost, _ in priced)
        limit += TIE_MS + TIE_SHARE * limit
        return self._rng.choice([pair for pair in priced if pair[0] <= limit])


def _few(nodes: list[Candidate], cost: Callable[[Candidate], float]) -> list[Candidate]:
    return nodes if len(nodes) <= PAIRED else sorted(nodes, key=cost)[:PAIRED]
