"""Predicted milliseconds of one request on each node, or on each pair: the arithmetic of placement.

In: the request's facts and the figures of a group of nodes, an array for each figure. Out: arrays
of costs until the request decodes, plus what it takes from the sequences that decode there already.
Nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_protocol.ids import NodeId
from baton_protocol.store import Speeds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Used while no node has measured the speed in question.
FALLBACK = Speeds(
    prefill_tokens_per_s=1000.0,
    decode_step_ms=20.0,
    put_bytes_per_s=200e6,
    get_bytes_per_s=200e6,
    get_latency_ms=1.0,
)
SPEEDS = Speeds.__struct_fields__
# A sequence that joins makes each other's step longer by about this share of it.
JOIN_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """The request. `stored[i]`: the store holds chunk i; its length is the number of full chunks.
    `store_up` False: nothing can be handed over. `prompt_tokens` of a request that is `resumed`
    are all it has, so what its client got counts as prompt."""

    prompt_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    stored: Sequence[bool] = ()
    sequences: int = 1
    store_up: bool = True
    resumed: bool = False
    prompt_logprobs: bool = False
    stored_before: Ints = field(init=False, compare=False)  # [i]: of the first i chunks

    def __post_init__(self) -> None:
        before = np.zeros(len(self.stored) + 1, dtype=np.int64)
        if any(self.stored):
            np.cumsum(np.frombuffer(bytes(self.stored), dtype=np.uint8), out=before[1:])
        object.__setattr__(self, "stored_before", before)

    @property
    def tail(self) -> int:
        """At least one token is computed wherever the request decodes."""
        return max(1, self.prompt_tokens - len(self.stored) * self.chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one role that may be chosen: entry i of each array is node i's. `cached_chunks`
    leading chunks of the prompt are in its cache; `requests` are what it has, prefill jobs too;
    `store_up`: it can publish and fetch. The rest are its speeds (baton_protocol.store.Speeds);
    `measured`: none of them is 0."""

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
    """One request's costs on each node of a group. Speeds must be above 0 (see with_fallbacks).

    fetchable     chunks that the store holds and the node does not; holes between are computed
    store_ms      fetching these takes so long, and computing them `store_compute_ms`
    uncached      prompt tokens it has to compute: neither in its cache nor worth fetching
    queue_ms      until it has computed what is before this request
    compute_ms    of the uncached tokens
    fetch_ms      of what it fetches: all that is fetchable, or nothing where computing is cheaper
    prefill_ms    until it has the first token, doing all of the prompt
    alone_ms      the same, and what the sequences that decode there lose by it
    tail_ms       of the tokens that a decode node computes whoever prefills
    join_ms       what it adds then: these, and what the sequences that decode there lose
    """

    def __init__(self, facts: RequestFacts, group: NodeGroup) -> None:
        self.facts, self.group = facts, group
        self._token_ms = token_ms = 1000 / group.prefill_tokens_per_s
        self.fetchable = _beyond(facts.stored_before, group)
        self.store_ms, self.store_compute_ms = self._ways(token_ms)
        fetched = self.store_ms < self.store_compute_ms
        found = group.cached_chunks + np.where(fetched, self.fetchable, 0)
        self.uncached = facts.prompt_tokens - found * facts.chunk_tokens
        self.queue_ms = group.queued_tokens * token_ms
        self.compute_ms = self.uncached * token_ms
        self.fetch_ms = np.where(fetched, self.store_ms, 0.0)
        self.prefill_ms = self.queue_ms + self.compute_ms + self.fetch_ms

    @cached_property
    def _joining_ms(self) -> Floats:
        """What each sequence that decodes there loses by those that join."""
        return JOIN_SHARE * self.facts.sequences * self.group.decode_step_ms

    @cached_property
    def _alone_slows_ms(self) -> Floats:
        return self.group.sequences * (self.compute_ms + self._joining_ms)

    @cached_property
    def alone_ms(self) -> Floats:
        return self.prefill_ms + self._alone_slows_ms

    @cached_property
    def tail_ms(self) -> Floats:
        return self.facts.tail * self._token_ms

    @cached_property
    def join_ms(self) -> Floats:
        return self.tail_ms + self.group.sequences * (self.tail_ms + self._joining_ms)

    def _ways(self, token_ms: Floats) -> tuple[Floats, Floats]:
        if not self.fetchable.any():
            none = np.zeros(len(token_ms))
            return none, none
        bytes_ms = 1000.0 * self.facts.chunk_bytes / self.group.get_bytes_per_s
        latency_ms = np.where(self.fetchable > 0, self.group.get_latency_ms, 0.0)
        compute_ms = self.fetchable * self.facts.chunk_tokens * token_ms
        return latency_ms + self.fetchable * bytes_ms, compute_ms

    def parts(self, nodes: Ints) -> Floats:
        """What alone_ms of these nodes is the sum of, a row each: the queue, computing, fetching,
        and what others lose."""
        rows = (self.queue_ms, self.compute_ms, self.fetch_ms, self._alone_slows_ms)
        return np.array([row[nodes] for row in rows])


class PairCosts:
    """Costs of the pairs of some prefill nodes (rows) with some decode nodes (columns).

    Chunks travel while later ones are computed: only what outlasts the prefill counts, and at least
    the last chunk does. So does what outlasts it all of the decode node's own queue.
    """

    def __init__(self, prefills: NodeCosts, decodes: NodeCosts, some: Ints, others: Ints) -> None:
        self.prefills, self.decodes = prefills, decodes
        self._some, self._others = some, others
        facts, p, d = prefills.facts, prefills.group, decodes.group
        slower = np.minimum(p.put_bytes_per_s[some, None], d.get_bytes_per_s[others])
        chunk_ms = 1000.0 * facts.chunk_bytes / slower
        lacking = len(facts.stored) - d.cached_chunks[others]
        last = np.minimum(lacking, 1)
        gap_ms = (prefills.compute_ms + prefills.fetch_ms)[some, None]
        exposed = np.maximum(lacking * chunk_ms - gap_ms, last * chunk_ms)
        self._exposed = exposed + last * d.get_latency_ms[others]
        arrived = prefills.prefill_ms[some, None] + self._exposed
        self._waits = np.maximum(decodes.queue_ms[others] - arrived, 0.0)
        self.split_ms: Floats = arrived + self._waits + decodes.join_ms[others]

    def ends(self, pair: int) -> tuple[int, int]:
        """The prefill and the decode node of a place in split_ms, row after row."""
        row, column = divmod(pair, len(self._others))
        return int(self._some[row]), int(self._others[column])

    def parts(self, pairs: Ints) -> Floats:
        """What split_ms of these pairs is the sum of, as Prices.parts says it."""
        rows, columns = np.divmod(pairs, len(self._others))
        p, d = self._some[rows], self._others[columns]
        return np.array(
            [
                self.prefills.queue_ms[p] + self._waits[rows, columns],
                self.prefills.compute_ms[p] + self.decodes.tail_ms[d],
                self.prefills.fetch_ms[p] + self._exposed[rows, columns],
                self.decodes.join_ms[d] - self.decodes.tail_ms[d],
            ]
        )


def _beyond(stored_before: Ints, group: NodeGroup) -> Ints:
    """Chunks in the store behind what each node holds, for nodes that reach it."""
    if not stored_before[-1]:
        return np.zeros(len(group), dtype=np.int64)
    beyond: Ints = (stored_before[-1] - stored_before[group.cached_chunks]) * group.store_up
    return beyond


def with_fallbacks(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Speeds a node has not measured are the median of all that have, else FALLBACK's."""
    if all(group.measured for group in groups):
        return list(groups)
    some = [group for group in groups if len(group)]
    filled: list[dict[str, Any]] = [{} for _ in some]
    for name in SPEEDS:
        columns = [getattr(group, name) for group in some]
        if all(column.all() for column in columns):
            continue
        usual = _usual(name, np.concatenate(columns))
        for speeds, column in zip(filled, columns, strict=True):
            speeds[name] = np.where(column > 0, column, usual)
    known = iter([replace(group, **speeds) for group, speeds in zip(some, filled, strict=True)])
    return [next(known) if len(group) else group for group in groups]


def _usual(name: str, values: Floats) -> float:
    known = values[values > 0]
    fallback: float = getattr(FALLBACK, name)
    return float(np.median(known)) if len(known) else fallback


def only(group: NodeGroup, chosen: Bools) -> NodeGroup:
    """The nodes that are marked."""
    found: dict[str, Any] = {
        field.name: getattr(group, field.name)[chosen]
        for field in fields(group)
        if field.name not in ("nodes", "measured")
    }
    names = [node for node, kept in zip(group.nodes, chosen, strict=True) if kept]
    return NodeGroup(nodes=names, measured=group.measured, **found)
