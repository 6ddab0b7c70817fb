"""Predicts what a request costs on each node and on each pair of nodes, in milliseconds.

In: the facts of the request, and one array per figure of the nodes. Out: arrays of costs, and
their parts. This module chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_protocol.ids import NodeId
from baton_protocol.store import Speeds

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
    `prompt_tokens` includes the tokens its client has. One with `pooling` gets a vector.

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
    reads_no_cache: bool = False
    pooling: bool = False
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
    (baton_protocol.store.Speeds), all above 0 (see fill_speeds)."""

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

    def __len__(self) -> int:
        return len(self.nodes)


class NodeCosts:
    """Predicted costs of one request on each node of a group, in milliseconds.

    In: the request's facts, and one array per figure of the group. Out: arrays of costs until the
    request decodes, including the slowdown of the sequences that already decode there. This class
    chooses nothing.

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
        self.fetchable = _stored_beyond(facts.stored_before, group)
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

    def split_pair(self, pair: int) -> tuple[int, int]:
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


def _stored_beyond(stored_before: Ints, group: NodeGroup) -> Ints:
    """Stored chunks after each node's cached ones; 0 for nodes that cannot reach the store."""
    if not stored_before[-1]:
        return np.zeros(len(group), dtype=np.int64)
    beyond: Ints = (stored_before[-1] - stored_before[group.cached_chunks]) * group.store_up
    return beyond


def fill_speeds(groups: Sequence[Floats]) -> list[Floats]:
    """Replace unmeasured speeds by the median of the measured ones of all groups, else by
    FALLBACK's. Each group has a row for each of SPEEDS, and a column for each node."""
    everywhere = np.concatenate(groups, axis=1)
    typical = [
        _typical_speed(name, row[row > 0]) for name, row in zip(SPEEDS, everywhere, strict=True)
    ]
    return [np.where(speeds > 0, speeds, np.array(typical)[:, None]) for speeds in groups]


def _typical_speed(name: str, measured: Floats) -> float:
    fallback: float = getattr(FALLBACK, name)
    return float(np.median(measured)) if len(measured) else fallback


def join_groups(parts: Sequence[NodeGroup]) -> NodeGroup:
    """One group of all these nodes, whatever their roles."""
    arrays: dict[str, Any] = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(NodeGroup)
        if field.name != "nodes"
    }
    return NodeGroup(nodes=[node for part in parts for node in part.nodes], **arrays)


def select_nodes(group: NodeGroup, chosen: Bools) -> NodeGroup:
    """The nodes for which `chosen` is True."""
    arrays: dict[str, Any] = {
        field.name: getattr(group, field.name)[chosen]
        for field in fields(group)
        if field.name != "nodes"
    }
    names = [node for node, kept in zip(group.nodes, chosen, strict=True) if kept]
    return NodeGroup(nodes=names, **arrays)
