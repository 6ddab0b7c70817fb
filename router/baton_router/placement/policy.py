"""Chooses where a request runs: a pure function from its facts and two groups of nodes.

The cost of a place is in predicted milliseconds (see NodeCosts), and the lowest cost wins. Costs
within measuring noise are a tie, broken at random so that idle nodes share the work. Other policies
rank nodes differently (see `rank`) and follow the same rules for hand-off. Every placement explains
itself. If no node may run the request, the result is Missing, and the caller waits or refuses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from baton_protocol.ids import NodeId
from baton_protocol.policies import Handoff, MissingRole, Ranking
from baton_router.placement.costs import (
    Floats,
    Ints,
    NodeCosts,
    NodeGroup,
    PairCosts,
    RequestFacts,
    join_groups,
)
from baton_router.placement.placement import Considered, Missing, Placement, PlacementReason

# Predictions closer than this are a tie: measured speeds are no more precise.
TIE_SHARE = 0.02
TIE_MS = 0.1
# Up to this many nodes of each role, all pairs are compared; beyond, pairs of the best single
# nodes.
PAIRED = 16
# How many of the considered options a placement reports.
CONSIDERED_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """`auto` splits a request with at least `min_tokens` uncached tokens, unless that is predicted
    to cost more than the decode node alone plus `slack_ms` and `slack_share` of its cost.
    `missing_role`: whether the other role runs a request if its own role has no ready node.
    `ranking`: which node is best."""

    handoff: Handoff = "auto"
    min_tokens: int = 128
    slack_ms: float = 20.0
    slack_share: float = 0.1
    missing_role: MissingRole = "aggregate"
    ranking: Ranking = "cost"


def hands_over(handoff: Handoff, min_tokens: int, uncached: int) -> bool:
    """Whether prefill nodes compute a prompt with this many uncached tokens."""
    return handoff == "always" or (handoff == "auto" and uncached >= min_tokens)


@dataclass(frozen=True, slots=True)
class _Option:
    """A single node, or a pair if `pairs` is set. `cost` is its predicted ms, `at` its index among
    the nodes or in `pairs.split_ms`."""

    cost: float
    at: int
    pairs: PairCosts | None = None


def place(
    facts: RequestFacts,
    prefills: NodeGroup,
    decodes: NodeGroup,
    policy: PlacementPolicy,
    rng: random.Random,
    turn: int = 0,
) -> Placement | Missing:
    """Choose among nodes that are all ready and of one kind. `turn` counts placements, for the
    round-robin ranking."""
    if facts.pooling:
        return _place_on_any(facts, join_groups((prefills, decodes)), policy, rng, turn)
    alone = decodes if len(decodes) else prefills
    if not len(alone) or (alone is prefills and policy.missing_role != "aggregate"):
        return Missing("decode", policy.missing_role)
    chooser = _Chooser(NodeCosts(facts, alone), policy, rng, turn)
    whole = chooser.choose_node()
    if alone is prefills:
        return chooser.make_placement(whole, "no_decode", "no ready decode node")
    if facts.prompt_logprobs:
        return chooser.make_placement(
            whole, "prompt_logprobs", "one node must compute the whole prompt"
        )
    if facts.reads_no_cache:
        return chooser.make_placement(whole, "no_cache", "the request reads no cached KV")
    if facts.resumed:
        return chooser.make_placement(whole, "resumed", "the client already has tokens")
    if policy.handoff == "never":
        return chooser.make_placement(whole, "never", "hand-off is off")
    return _place_with_prefill(chooser, whole, prefills)


def _place_on_any(
    facts: RequestFacts, nodes: NodeGroup, policy: PlacementPolicy, rng: random.Random, turn: int
) -> Placement | Missing:
    """The best node for a request that gets a vector: roles make no difference to it."""
    if not len(nodes):
        return Missing("decode", policy.missing_role)
    chooser = _Chooser(NodeCosts(facts, nodes), policy, rng, turn)
    return chooser.make_placement(chooser.choose_node(), "pooling", "one node makes the vector")


def _place_with_prefill(
    chooser: _Chooser, whole: _Option, prefills: NodeGroup
) -> Placement | Missing:
    """Decide whether to split a request that may be split."""
    facts, policy = chooser.costs.facts, chooser.policy
    publishing = prefills.store_up.nonzero()[0]
    fetching = chooser.costs.group.store_up.nonzero()[0]
    uncached = int(chooser.costs.uncached[whole.at])
    long = hands_over(policy.handoff, policy.min_tokens, uncached)
    if not len(prefills):
        if policy.missing_role != "aggregate" and facts.store_up and len(fetching) and long:
            return Missing("prefill", policy.missing_role)
        return chooser.make_placement(whole, "no_prefill", "no ready prefill node")
    if not facts.store_up:
        return chooser.make_placement(whole, "store_down", "the store's index does not answer")
    if not len(publishing) or not len(fetching):
        return chooser.make_placement(
            whole, "store_down", "no prefill and decode node both reach the store"
        )
    if not long:
        return chooser.make_placement(
            whole, "short", f"hand-off needs {policy.min_tokens} uncached tokens"
        )
    split = chooser.choose_pair(NodeCosts(facts, prefills), publishing, fetching)
    if policy.handoff == "always":
        return chooser.make_placement(split, "always", "hand-off is always on")
    if split.cost <= whole.cost * (1 + policy.slack_share) + policy.slack_ms:
        return chooser.make_placement(
            split, "split", f"decode node alone costs {whole.cost:.1f} ms"
        )
    return chooser.make_placement(whole, "costly", f"hand-off costs {split.cost:.1f} ms")


def rank(ranking: Ranking, costs: NodeCosts, turn: int) -> Floats:
    """One number per node, of which the lowest is best: predicted milliseconds (cost), 0 (random),
    distance from `turn` (round-robin), requests (least-request), or minus the cached chunks
    (prefix)."""
    group = costs.group
    if ranking == "random":
        return np.zeros(len(group))
    if ranking == "round-robin":
        return (np.arange(len(group), dtype=np.float64) - turn) % len(group)
    if ranking == "least-request":
        return group.requests
    if ranking == "prefix":
        return -group.cached_chunks.astype(np.float64)
    return costs.alone_ms


class _Chooser:
    """Chooses for one request. `costs` are those of the nodes that may decode."""

    def __init__(
        self, costs: NodeCosts, policy: PlacementPolicy, rng: random.Random, turn: int
    ) -> None:
        self.costs = costs
        self.policy = policy
        self._rng = rng
        self._turn = turn
        self._pairs: PairCosts | None = None

    def choose_node(self) -> _Option:
        """The best single node."""
        node = self._best_node(self.costs, None)
        return _Option(float(self.costs.alone_ms[node]), node)

    def choose_pair(self, prefills: NodeCosts, publishing: Ints, fetching: Ints) -> _Option:
        """The best pair of a prefill node that can publish and a decode node that can fetch."""
        if self.policy.ranking == "cost":
            prefill_indices = self._narrow_down(prefills.prefill_ms, publishing)
            decode_indices = self._narrow_down(self.costs.join_ms, fetching)
        else:
            prefill_indices = np.array([self._best_node(prefills, publishing)])
            decode_indices = np.array([self._best_node(self.costs, fetching)])
        self._pairs = PairCosts(prefills, self.costs, prefill_indices, decode_indices)
        split_ms = self._pairs.split_ms.ravel()
        pair = self._pick_lowest(split_ms, _tie_limit(split_ms))
        return _Option(float(split_ms[pair]), pair, self._pairs)

    def make_placement(self, best: _Option, reason: PlacementReason, why: str) -> Placement:
        prompt_costs, node, prefill = self.costs, best.at, None
        decode = node
        if best.pairs is not None:
            prompt_costs = best.pairs.prefills
            node, decode = best.pairs.split_pair(best.at)
            prefill = prompt_costs.group.nodes[node]
        uncached, total = int(prompt_costs.uncached[node]), prompt_costs.facts.prompt_tokens
        store = _describe_store(prompt_costs, node)
        summary = f"uncached {uncached} of {total} tokens, {best.cost:.1f} ms{store}"
        return Placement(
            decode=self.costs.group.nodes[decode],
            prefill=prefill,
            reason=reason,
            explanation=f"{summary}; {why}",
            predicted_ms=best.cost,
            uncached=uncached,
            considered=self._consider_options(best),
        )

    def _consider_options(self, best: _Option) -> tuple[Considered, ...]:
        """The cheapest options, always including the chosen one."""
        alone_ms = self.costs.alone_ms
        options = [
            (float(alone_ms[n]), int(n), False)
            for n in _cheapest_indices(alone_ms, CONSIDERED_SHOWN)
        ]
        if self._pairs is not None:
            split_ms = self._pairs.split_ms.ravel()
            options += [
                (float(split_ms[n]), int(n), True)
                for n in _cheapest_indices(split_ms, CONSIDERED_SHOWN)
            ]
        options = sorted(options)[:CONSIDERED_SHOWN]
        chosen = (best.cost, best.at, best.pairs is not None)
        if chosen not in options:
            options[CONSIDERED_SHOWN - 1 :] = [chosen]
        considered = _consider_nodes(self.costs, [at for _, at, pair in options if not pair])
        if self._pairs is not None:
            considered += _consider_pairs(self._pairs, [at for _, at, pair in options if pair])
        return tuple(sorted(considered, key=lambda option: option.predicted_ms))

    def _best_node(self, costs: NodeCosts, among: Ints | None) -> int:
        """The best node by the ranking, among all or among the given indices."""
        ranking = self.policy.ranking
        ranks = rank(ranking, costs, self._turn)
        if among is not None:
            ranks = ranks[among]
        limit = _tie_limit(ranks) if ranking == "cost" else float(ranks.min())
        index = self._pick_lowest(ranks, limit)
        return index if among is None else int(among[index])

    def _narrow_down(self, costs_ms: Floats, among: Ints) -> Ints:
        """Up to PAIRED nodes to search in pairs; a random sample if more tie for the best."""
        if len(among) <= PAIRED:
            return among
        candidate_costs = costs_ms[among]
        tied = (candidate_costs <= _tie_limit(candidate_costs)).nonzero()[0]
        if len(tied) <= PAIRED:
            return among[_cheapest_indices(candidate_costs, PAIRED)]
        return among[tied[self._rng.sample(range(len(tied)), PAIRED)]]

    def _pick_lowest(self, costs: Floats, limit: float) -> int:
        tied = (costs <= limit).nonzero()[0]
        return int(tied[self._rng.randrange(len(tied))])


def _tie_limit(costs: Floats) -> float:
    """The highest cost that ties with the lowest."""
    return float(costs.min()) * (1 + TIE_SHARE) + TIE_MS


def _cheapest_indices(costs: Floats, count: int) -> Ints:
    """Indices of the lowest costs, in any order."""
    if len(costs) <= count:
        return np.arange(len(costs))
    return costs.argpartition(count - 1)[:count]


def _consider_nodes(costs: NodeCosts, nodes: list[int]) -> list[Considered]:
    columns = costs.parts(np.array(nodes, dtype=np.int64)).T.tolist()
    return [
        _consider_option(costs, node, costs.group.nodes[node], None, parts)
        for node, parts in zip(nodes, columns, strict=True)
    ]


def _consider_pairs(pairs: PairCosts, pair_indices: list[int]) -> list[Considered]:
    columns = pairs.parts(np.array(pair_indices, dtype=np.int64)).T.tolist()
    considered = []
    for pair, parts in zip(pair_indices, columns, strict=True):
        prefill, decode = pairs.split_pair(pair)
        name = pairs.prefills.group.nodes[prefill]
        considered.append(
            _consider_option(
                pairs.prefills, prefill, pairs.decodes.group.nodes[decode], name, parts
            )
        )
    return considered


def _consider_option(
    prompt_costs: NodeCosts, node: int, decode: NodeId, prefill: NodeId | None, parts: list[float]
) -> Considered:
    """`node` is the index in `prompt_costs` of the node that computes the prompt."""
    queue_ms, compute_ms, fetch_ms, slowdown_ms = parts
    return Considered(
        decode=decode,
        prefill=prefill,
        predicted_ms=sum(parts),
        queue_ms=queue_ms,
        compute_ms=compute_ms,
        fetch_ms=fetch_ms,
        slowdown_ms=slowdown_ms,
        cached_tokens=int(prompt_costs.group.cached_chunks[node]) * prompt_costs.facts.chunk_tokens,
        uncached=int(prompt_costs.uncached[node]),
    )


def _describe_store(costs: NodeCosts, node: int) -> str:
    """Describe the stored chunks of the prompt and the time to fetch or to compute them."""
    chunks = int(costs.fetchable[node])
    if not chunks:
        return ""
    times = f"fetch {costs.store_ms[node]:.1f} ms, compute {costs.store_compute_ms[node]:.1f} ms"
    return f"; store has {chunks} {'chunk' if chunks == 1 else 'chunks'}: {times}"
