"""Chooses where a request runs: a pure function from its facts and two groups of nodes.

The cost of a place is in predicted milliseconds (see NodeCosts), and the lowest cost wins. Costs
within measuring noise are a tie, broken at random so that idle nodes share the work. Other policies
rank nodes differently (see `rank`) and follow the same rules for hand-off. Every placement explains
itself. If no node may run the request, the result is Missing, and the caller waits or refuses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from baton_protocol.ids import NodeId
from baton_protocol.policies import Handoff, MissingRole, Ranking
from baton_protocol.store import Role, Speeds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Used while no node has measured the speed.
FALLBACK = Speeds(
    prefill_tokens_per_s=1000.0,
    decode_step_ms=20.0,
    put_bytes_per_s=200e6,
    get_bytes_per_s=200e6,
    get_latency_ms=1.0,
)
SPEEDS = Speeds.__struct_fields__
# Each sequence that joins a node makes the steps of the others longer by about this share.
JOIN_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """The facts of a request. `stored[i]`: the store holds chunk i; its length is the number of
    full chunks. `store_up` False: chunks cannot be handed off. For a `resumed` request,
    `prompt_tokens` includes the tokens its client has.

    `chunk_bytes` is an upper bound if layers have windows: early chunks of a prompt have fewer
    bytes, so a hand-off may take less time than predicted."""

    prompt_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    stored: Sequence[bool] = ()
    sequences: int = 1
    store_up: bool = True
    resumed: bool = False
    prompt_logprobs: bool = False
    stored_before: Ints = field(init=False, compare=False)  # [i]: stored ones of the first i chunks

    def __post_init__(self) -> None:
        before = np.zeros(len(self.stored) + 1, dtype=np.int64)
        if any(self.stored):
            np.cumsum(np.frombuffer(bytes(self.stored), dtype=np.uint8), out=before[1:])
        object.__setattr__(self, "stored_before", before)

    @property
    def tail(self) -> int:
        """Tokens after the last full chunk, which the decode node computes itself; at least 1."""
        return max(1, self.prompt_tokens - len(self.stored) * self.chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """The eligible nodes of one role: entry i of each array is node i's. `cached_chunks`: leading
    chunks of the prompt in its cache. `requests`: all its requests, including prefill jobs.
    `store_up`: it can publish and fetch. The other arrays are its speeds
    (baton_protocol.store.Speeds). `measured`: none of the speeds is 0."""

    nodes: Sequence[NodeId]
    queued_tokens: Floats
    sequences: Floats
    requests: Floats
    cached_chunks: Ints
    store_up: Bools
    prefill_tokens_per_s: Floats
    decode_step_ms: Floats
    put_bytes_per_s: Floats
    get_bytes_per_s: Floats
    get_latency_ms: Floats
    measured: bool = False

    def __len__(self) -> int:
        return len(self.nodes)


class NodeCosts:
    """Predicted costs of one request on each node of a group, in milliseconds.

    In: the request's facts, and one array per figure of the group. Speeds must be above 0 (see
    with_fallbacks). Out: arrays of costs until the request decodes, including the slowdown of the
    sequences that already decode there. This class chooses nothing.

    fetchable         chunks that the store holds and the node does not; gaps are computed
    store_ms          time to fetch these chunks
    store_compute_ms  time to compute these chunks instead
    uncached          prompt tokens to compute: neither cached nor cheaper to fetch
    queue_ms          time to compute the prompts queued before this request
    compute_ms        time to compute the uncached tokens
    fetch_ms          time to fetch: all fetchable chunks, or 0 if computing them is cheaper
    prefill_ms        time to the first token if the node does the whole prompt
    alone_ms          prefill_ms plus the slowdown of the sequences that decode there
    tail_ms           time for the tokens that a decode node computes after any hand-off
    join_ms           tail_ms plus the slowdown of the sequences that decode there
    """

    def __init__(self, facts: RequestFacts, group: NodeGroup) -> None:
        self.facts, self.group = facts, group
        self._token_ms = token_ms = 1000 / group.prefill_tokens_per_s
        self.fetchable = _beyond(facts.stored_before, group)
        self.store_ms, self.store_compute_ms = self._fetch_or_compute_ms(token_ms)
        fetched = self.store_ms < self.store_compute_ms
        covered_chunks = group.cached_chunks + np.where(fetched, self.fetchable, 0)
        self.uncached = facts.prompt_tokens - covered_chunks * facts.chunk_tokens
        self.queue_ms = group.queued_tokens * token_ms
        self.compute_ms = self.uncached * token_ms
        self.fetch_ms = np.where(fetched, self.store_ms, 0.0)
        self.prefill_ms = self.queue_ms + self.compute_ms + self.fetch_ms

    @cached_property
    def _joining_ms(self) -> Floats:
        """Slowdown of each sequence that decodes there, caused by the sequences that join."""
        return JOIN_SHARE * self.facts.sequences * self.group.decode_step_ms

    @cached_property
    def _slowdown_ms(self) -> Floats:
        return self.group.sequences * (self.compute_ms + self._joining_ms)

    @cached_property
    def alone_ms(self) -> Floats:
        return self.prefill_ms + self._slowdown_ms

    @cached_property
    def tail_ms(self) -> Floats:
        return self.facts.tail * self._token_ms

    @cached_property
    def join_ms(self) -> Floats:
        return self.tail_ms + self.group.sequences * (self.tail_ms + self._joining_ms)

    def _fetch_or_compute_ms(self, token_ms: Floats) -> tuple[Floats, Floats]:
        if not self.fetchable.any():
            none = np.zeros(len(token_ms))
            return none, none
        bytes_ms = 1000.0 * self.facts.chunk_bytes / self.group.get_bytes_per_s
        latency_ms = np.where(self.fetchable > 0, self.group.get_latency_ms, 0.0)
        compute_ms = self.fetchable * self.facts.chunk_tokens * token_ms
        return latency_ms + self.fetchable * bytes_ms, compute_ms

    def parts(self, nodes: Ints) -> Floats:
        """The parts of alone_ms for these nodes, one row each: queue, computing, fetching, and the
        slowdown of others."""
        rows = (self.queue_ms, self.compute_ms, self.fetch_ms, self._slowdown_ms)
        return np.array([row[nodes] for row in rows])


class PairCosts:
    """Costs of pairs of some prefill nodes (rows) and some decode nodes (columns).

    Chunks travel while later ones are computed. Only the transfer time beyond the prefill counts,
    and at least the time of the last chunk. The decode node's own queue counts as far as it is
    longer than both.
    """

    def __init__(
        self, prefills: NodeCosts, decodes: NodeCosts, prefill_indices: Ints, decode_indices: Ints
    ) -> None:
        self.prefills, self.decodes = prefills, decodes
        self._prefill_indices, self._decode_indices = prefill_indices, decode_indices
        facts, p, d = prefills.facts, prefills.group, decodes.group
        bytes_per_s = np.minimum(
            p.put_bytes_per_s[prefill_indices, None], d.get_bytes_per_s[decode_indices]
        )
        chunk_ms = 1000.0 * facts.chunk_bytes / bytes_per_s
        missing = len(facts.stored) - d.cached_chunks[decode_indices]
        has_last = np.minimum(missing, 1)
        gap_ms = (prefills.compute_ms + prefills.fetch_ms)[prefill_indices, None]
        exposed = np.maximum(missing * chunk_ms - gap_ms, has_last * chunk_ms)
        self._exposed = exposed + has_last * d.get_latency_ms[decode_indices]
        arrived = prefills.prefill_ms[prefill_indices, None] + self._exposed
        self._waits = np.maximum(decodes.queue_ms[decode_indices] - arrived, 0.0)
        self.split_ms: Floats = arrived + self._waits + decodes.join_ms[decode_indices]

    def ends(self, pair: int) -> tuple[int, int]:
        """The prefill and the decode node of a flat index into split_ms."""
        row, column = divmod(pair, len(self._decode_indices))
        return int(self._prefill_indices[row]), int(self._decode_indices[column])

    def parts(self, pairs: Ints) -> Floats:
        """The parts of split_ms for these pairs, in the rows of NodeCosts.parts."""
        rows, columns = np.divmod(pairs, len(self._decode_indices))
        p, d = self._prefill_indices[rows], self._decode_indices[columns]
        return np.array(
            [
                self.prefills.queue_ms[p] + self._waits[rows, columns],
                self.prefills.compute_ms[p] + self.decodes.tail_ms[d],
                self.prefills.fetch_ms[p] + self._exposed[rows, columns],
                self.decodes.join_ms[d] - self.decodes.tail_ms[d],
            ]
        )


def _beyond(stored_before: Ints, group: NodeGroup) -> Ints:
    """Stored chunks after each node's cached ones; 0 for nodes that cannot reach the store."""
    if not stored_before[-1]:
        return np.zeros(len(group), dtype=np.int64)
    beyond: Ints = (stored_before[-1] - stored_before[group.cached_chunks]) * group.store_up
    return beyond


def with_fallbacks(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Replace unmeasured speeds by the median of the measured ones, else by FALLBACK's."""
    if all(group.measured for group in groups):
        return list(groups)
    nonempty = [group for group in groups if len(group)]
    filled: list[dict[str, Any]] = [{} for _ in nonempty]
    for name in SPEEDS:
        columns = [getattr(group, name) for group in nonempty]
        if all(column.all() for column in columns):
            continue
        typical = _typical_speed(name, np.concatenate(columns))
        for speeds, column in zip(filled, columns, strict=True):
            speeds[name] = np.where(column > 0, column, typical)
    known = iter([replace(group, **speeds) for group, speeds in zip(nonempty, filled, strict=True)])
    return [next(known) if len(group) else group for group in groups]


def _typical_speed(name: str, values: Floats) -> float:
    measured = values[values > 0]
    fallback: float = getattr(FALLBACK, name)
    return float(np.median(measured)) if len(measured) else fallback


def only(group: NodeGroup, chosen: Bools) -> NodeGroup:
    """The nodes for which `chosen` is True."""
    arrays: dict[str, Any] = {
        field.name: getattr(group, field.name)[chosen]
        for field in fields(group)
        if field.name not in ("nodes", "measured")
    }
    names = [node for node, kept in zip(group.nodes, chosen, strict=True) if kept]
    return NodeGroup(nodes=names, measured=group.measured, **arrays)


Way = Literal["split", "whole"]

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

# Predictions closer than this are a tie: measured speeds are no more precise.
TIE_SHARE = 0.02
TIE_MS = 0.1
# Up to this many nodes of each role, all pairs are compared; beyond, pairs of the best single
# nodes.
PAIRED = 16
# How many of the considered options a placement reports.
CONSIDERED_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One considered option. `predicted_ms` is the sum of its parts, in milliseconds: the queue
    ahead, computing the uncached tokens, fetching beyond that, and the slowdown of sequences that
    already decode there."""

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
    """`uncached`: prompt tokens to compute, booked on the prefill node if there is one.
    `predicted_ms`: time until the request decodes, plus the slowdown of others. `considered` holds
    the best options, the cheapest first."""

    decode: NodeId
    prefill: NodeId | None
    reason: Reason
    explanation: str
    predicted_ms: float
    uncached: int
    considered: tuple[Considered, ...] = ()

    def line(self) -> str:
        """The value of the `x-baton-placement` header."""
        prefill = self.prefill or "-"
        return f"prefill={prefill} decode={self.decode} reason={self.reason}: {self.explanation}"


@dataclass(frozen=True, slots=True)
class Missing:
    """No node of this role is ready, and no node of the other role may replace it."""

    role: Role
    policy: MissingRole

    @property
    def explanation(self) -> str:
        if self.policy == "aggregate":
            return "no node is ready"
        return f"no {self.role} node is ready, and missing_role is {self.policy}"


@dataclass(frozen=True, slots=True)
class _Way:
    """A single node, or a pair if `pairs` is set. `cost` is its predicted ms, `at` its index among
    the nodes or in `pairs.split_ms`."""

    cost: float
    at: int
    pairs: PairCosts | None = None


def place(
    facts: RequestFacts,
    prefills: NodeGroup,
    decodes: NodeGroup,
    policy: Policy,
    rng: random.Random,
    turn: int = 0,
) -> Placement | Missing:
    """Choose among nodes that are all ready and of one kind. `turn` counts placements, for the
    round-robin ranking."""
    prefills, decodes = with_fallbacks([prefills, decodes])
    alone = decodes if len(decodes) else prefills
    if not len(alone) or (alone is prefills and policy.missing_role != "aggregate"):
        return Missing("decode", policy.missing_role)
    chooser = _Chooser(NodeCosts(facts, alone), policy, rng, turn)
    whole = chooser.whole()
    if alone is prefills:
        return chooser.placed(whole, "no_decode", "no ready decode node")
    if facts.prompt_logprobs:
        return chooser.placed(whole, "prompt_logprobs", "one node must compute the whole prompt")
    if facts.resumed:
        return chooser.placed(whole, "resumed", "the client already has tokens")
    if policy.handoff == "never":
        return chooser.placed(whole, "never", "hand-off is off")
    return _with_prefill(chooser, whole, prefills)


def _with_prefill(chooser: _Chooser, whole: _Way, prefills: NodeGroup) -> Placement | Missing:
    """Decide whether to split a request that may be split."""
    facts, policy = chooser.prices.facts, chooser.policy
    publishing = prefills.store_up.nonzero()[0]
    fetching = chooser.prices.group.store_up.nonzero()[0]
    uncached = int(chooser.prices.uncached[whole.at])
    long = hands_over(policy.handoff, policy.min_tokens, uncached)
    if not len(prefills):
        if policy.missing_role != "aggregate" and facts.store_up and len(fetching) and long:
            return Missing("prefill", policy.missing_role)
        return chooser.placed(whole, "no_prefill", "no ready prefill node")
    if not facts.store_up:
        return chooser.placed(whole, "store_down", "the store's index does not answer")
    if not len(publishing) or not len(fetching):
        return chooser.placed(
            whole, "store_down", "no prefill and decode node both reach the store"
        )
    if not long:
        return chooser.placed(whole, "short", f"hand-off needs {policy.min_tokens} uncached tokens")
    split = chooser.split(NodeCosts(facts, prefills), publishing, fetching)
    if policy.handoff == "always":
        return chooser.placed(split, "always", "hand-off is always on")
    if split.cost <= whole.cost * (1 + policy.slack_share) + policy.slack_ms:
        return chooser.placed(split, "split", f"decode node alone costs {whole.cost:.1f} ms")
    return chooser.placed(whole, "costly", f"hand-off costs {split.cost:.1f} ms")


def rank(ranking: Ranking, prices: NodeCosts, turn: int) -> Floats:
    """One number per node, of which the lowest is best: predicted milliseconds (cost), 0 (random),
    distance from `turn` (round-robin), requests (least-request), or minus the cached chunks
    (prefix)."""
    group = prices.group
    if ranking == "random":
        return np.zeros(len(group))
    if ranking == "round-robin":
        return (np.arange(len(group), dtype=np.float64) - turn) % len(group)
    if ranking == "least-request":
        return group.requests
    if ranking == "prefix":
        return -group.cached_chunks.astype(np.float64)
    return prices.alone_ms


class _Chooser:
    """Chooses for one request. `prices` are the costs of the nodes that may decode."""

    def __init__(self, prices: NodeCosts, policy: Policy, rng: random.Random, turn: int) -> None:
        self.prices = prices
        self.policy = policy
        self._rng = rng
        self._turn = turn
        self._pairs: PairCosts | None = None

    def whole(self) -> _Way:
        node = self._best(self.prices, None)
        return _Way(float(self.prices.alone_ms[node]), node)

    def split(self, prefills: NodeCosts, publishing: Ints, fetching: Ints) -> _Way:
        if self.policy.ranking == "cost":
            prefill_indices = self._few(prefills.prefill_ms, publishing)
            decode_indices = self._few(self.prices.join_ms, fetching)
        else:
            prefill_indices = np.array([self._best(prefills, publishing)])
            decode_indices = np.array([self._best(self.prices, fetching)])
        self._pairs = PairCosts(prefills, self.prices, prefill_indices, decode_indices)
        costs = self._pairs.split_ms.ravel()
        pair = self._lowest(costs, _limit(costs))
        return _Way(float(costs[pair]), pair, self._pairs)

    def placed(self, best: _Way, reason: Reason, why: str) -> Placement:
        prompt_costs, node, prefill = self.prices, best.at, None
        decode = node
        if best.pairs is not None:
            prompt_costs = best.pairs.prefills
            node, decode = best.pairs.ends(best.at)
            prefill = prompt_costs.group.nodes[node]
        uncached, total = int(prompt_costs.uncached[node]), prompt_costs.facts.prompt_tokens
        costs = (
            f"uncached {uncached} of {total} tokens, {best.cost:.1f} ms{_store(prompt_costs, node)}"
        )
        return Placement(
            decode=self.prices.group.nodes[decode],
            prefill=prefill,
            reason=reason,
            explanation=f"{costs}; {why}",
            predicted_ms=best.cost,
            uncached=uncached,
            considered=self._considered(best),
        )

    def _considered(self, best: _Way) -> tuple[Considered, ...]:
        """The cheapest options, always including the chosen one."""
        alone_ms = self.prices.alone_ms
        options = [
            (float(alone_ms[n]), int(n), False) for n in _cheapest(alone_ms, CONSIDERED_SHOWN)
        ]
        if self._pairs is not None:
            costs = self._pairs.split_ms.ravel()
            options += [(float(costs[n]), int(n), True) for n in _cheapest(costs, CONSIDERED_SHOWN)]
        options = sorted(options)[:CONSIDERED_SHOWN]
        chosen = (best.cost, best.at, best.pairs is not None)
        if chosen not in options:
            options[CONSIDERED_SHOWN - 1 :] = [chosen]
        considered = _consider_nodes(self.prices, [at for _, at, pair in options if not pair])
        if self._pairs is not None:
            considered += _consider_pairs(self._pairs, [at for _, at, pair in options if pair])
        return tuple(sorted(considered, key=lambda option: option.predicted_ms))

    def _best(self, prices: NodeCosts, among: Ints | None) -> int:
        """The best node by the ranking, among all or among the given indices."""
        ranking = self.policy.ranking
        ranks = rank(ranking, prices, self._turn)
        if among is not None:
            ranks = ranks[among]
        limit = _limit(ranks) if ranking == "cost" else float(ranks.min())
        index = self._lowest(ranks, limit)
        return index if among is None else int(among[index])

    def _few(self, costs: Floats, among: Ints) -> Ints:
        """Up to PAIRED nodes to search in pairs; a random sample if more tie for the best."""
        if len(among) <= PAIRED:
            return among
        candidate_costs = costs[among]
        tied = (candidate_costs <= _limit(candidate_costs)).nonzero()[0]
        if len(tied) <= PAIRED:
            return among[_cheapest(candidate_costs, PAIRED)]
        return among[tied[self._rng.sample(range(len(tied)), PAIRED)]]

    def _lowest(self, costs: Floats, limit: float) -> int:
        tied = (costs <= limit).nonzero()[0]
        return int(tied[self._rng.randrange(len(tied))])


def _limit(costs: Floats) -> float:
    """The highest cost that ties with the lowest."""
    return float(costs.min()) * (1 + TIE_SHARE) + TIE_MS


def _cheapest(costs: Floats, count: int) -> Ints:
    """Indices of the lowest costs, in any order."""
    if len(costs) <= count:
        return np.arange(len(costs))
    return costs.argpartition(count - 1)[:count]


def _consider_nodes(prices: NodeCosts, nodes: list[int]) -> list[Considered]:
    columns = prices.parts(np.array(nodes, dtype=np.int64)).T.tolist()
    return [
        _consider(prices, node, prices.group.nodes[node], None, parts)
        for node, parts in zip(nodes, columns, strict=True)
    ]


def _consider_pairs(pairs: PairCosts, pair_indices: list[int]) -> list[Considered]:
    columns = pairs.parts(np.array(pair_indices, dtype=np.int64)).T.tolist()
    considered = []
    for pair, parts in zip(pair_indices, columns, strict=True):
        prefill, decode = pairs.ends(pair)
        name = pairs.prefills.group.nodes[prefill]
        considered.append(
            _consider(pairs.prefills, prefill, pairs.decodes.group.nodes[decode], name, parts)
        )
    return considered


def _consider(
    prompt_costs: NodeCosts, node: int, decode: NodeId, prefill: NodeId | None, parts: list[float]
) -> Considered:
    """`closes` and `node` are the costs and the index of the node that computes the prompt."""
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


def _store(prices: NodeCosts, node: int) -> str:
    """Describe the stored chunks of the prompt and the time to fetch or to compute them."""
    chunks = int(prices.fetchable[node])
    if not chunks:
        return ""
    costs = f"fetch {prices.store_ms[node]:.1f} ms, compute {prices.store_compute_ms[node]:.1f} ms"
    return f"; store has {chunks} {'chunk' if chunks == 1 else 'chunks'}: {costs}"


@dataclass(frozen=True, slots=True)
class PredictionError:
    """A predicted and the measured time until a request decodes, in seconds."""

    way: Way
    predicted_s: float
    measured_s: float
