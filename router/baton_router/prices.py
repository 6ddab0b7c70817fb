"""Predicted milliseconds of one request on a node, or on a pair: the arithmetic of placement.

In: the request's facts and the candidates' figures. Out: costs until the request decodes, plus
what it takes from the sequences that decode there already. Nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

import msgspec

from baton_protocol.ids import NodeId
from baton_protocol.store import Role, Speeds, StoreHealth

# Used while no node has measured the speed in question.
FALLBACK = Speeds(
    prefill_tokens_per_s=1000.0,
    decode_step_ms=20.0,
    put_bytes_per_s=200e6,
    get_bytes_per_s=200e6,
    get_latency_ms=1.0,
)
# A sequence that joins makes each other's step longer by about this share of it.
JOIN_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node that may be chosen. `cached_chunks` leading chunks of the prompt are in its cache."""

    node: NodeId
    role: Role
    queued_tokens: int = 0
    sequences: int = 0
    speeds: Speeds = FALLBACK
    cached_chunks: int = 0
    store: StoreHealth = "up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The request. `stored[i]`: the store holds chunk i; its length is the number of full chunks.
    `store_up` False: nothing can be handed over. `prompt_tokens` of a request that is `resumed`
    are all it has, so what its client got counts as prompt."""

    prompt_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    stored: tuple[bool, ...] = ()
    sequences: int = 1
    store_up: bool = True
    resumed: bool = False
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Fetchable:
    """What the store holds of the prompt and a node does not, and what each way to it takes. The
    node decides again, with what it then knows."""

    chunks: int
    fetch_ms: float
    compute_ms: float

    @property
    def fetched(self) -> int:
        """Chunks that it is predicted to fetch: all, or none where computing them is cheaper."""
        return self.chunks if self.fetch_ms < self.compute_ms else 0

    def __str__(self) -> str:
        many = "chunk" if self.chunks == 1 else "chunks"
        ways = f"fetch {self.fetch_ms:.1f} ms, compute {self.compute_ms:.1f} ms"
        return f"store has {self.chunks} {many}: {ways}"


class Prices:
    """One request's costs on any node. Speeds must be above 0 (see with_fallbacks)."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._chunks = len(facts.stored)
        self._stored_before = (0, *accumulate(facts.stored))
        # At least one token is computed wherever the request decodes.
        self._tail = max(1, facts.prompt_tokens - self._chunks * facts.chunk_tokens)

    def uncached(self, node: Candidate) -> int:
        """Prompt tokens that the node has to compute: neither in its cache nor worth fetching."""
        found = node.cached_chunks + self.fetchable(node).fetched
        return self.facts.prompt_tokens - found * self.facts.chunk_tokens

    def fetchable(self, node: Candidate) -> Fetchable:
        """Holes between its chunks are computed."""
        chunks = self._stored_before[-1] - self._stored_before[node.cached_chunks]
        if not chunks or node.store != "up":
            return Fetchable(0, 0.0, 0.0)
        bytes_ms = 1000 * chunks * self.facts.chunk_bytes / node.speeds.get_bytes_per_s
        compute_ms = _compute_ms(node, chunks * self.facts.chunk_tokens)
        return Fetchable(chunks, node.speeds.get_latency_ms + bytes_ms, compute_ms)

    def alone_ms(self, node: Candidate) -> float:
        """The node does all of it, while the sequences that decode there wait for each piece."""
        stalls = node.sequences * _compute_ms(node, self.uncached(node))
        return self.prefill_ms(node) + stalls + self._joining_ms(node)

    def prefill_ms(self, node: Candidate) -> float:
        """Until the node has the first token: its queue, then the gap."""
        return _queue_ms(node) + self._gap_ms(node)

    def join_ms(self, node: Candidate) -> float:
        """What a decode node adds whoever prefills: the tail's recompute and the joining."""
        return _compute_ms(node, self._tail) * (1 + node.sequences) + self._joining_ms(node)

    def split_ms(self, prefill: Candidate, decode: Candidate) -> float:
        """Chunks travel while later ones are computed: only what outlasts the prefill counts, and
        at least the last chunk does. So does what outlasts it of the decode node's own queue."""
        slower = min(prefill.speeds.put_bytes_per_s, decode.speeds.get_bytes_per_s)
        chunk_ms = 1000 * self.facts.chunk_bytes / slower
        lacking = self._chunks - decode.cached_chunks
        exposed = max(lacking * chunk_ms - self._gap_ms(prefill), min(lacking, 1) * chunk_ms)
        exposed += min(lacking, 1) * decode.speeds.get_latency_ms
        arrived = self.prefill_ms(prefill) + exposed
        return max(arrived, _queue_ms(decode)) + self.join_ms(decode)

    def _gap_ms(self, node: Candidate) -> float:
        fetchable = self.fetchable(node)
        fetch_ms = fetchable.fetch_ms if fetchable.fetched else 0.0
        return fetch_ms + _compute_ms(node, self.uncached(node))

    def _joining_ms(self, node: Candidate) -> float:
        share = JOIN_SHARE * self.facts.sequences
        return node.sequences * share * node.speeds.decode_step_ms


def with_fallbacks(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Speeds a node has not measured are its neighbours' median, else FALLBACK's."""
    names = Speeds.__struct_fields__
    usual: dict[str, float] = {}
    filled = []
    for node in candidates:
        unknown = [name for name in names if not getattr(node.speeds, name) > 0]
        if unknown and not usual:
            usual = {name: _usual(name, candidates) for name in names}
        speeds = msgspec.structs.replace(node.speeds, **{name: usual[name] for name in unknown})
        filled.append(replace(node, speeds=speeds) if unknown else node)
    return filled


def _usual(name: str, candidates: Sequence[Candidate]) -> float:
    known = [value for node in candidates if (value := getattr(node.speeds, name)) > 0]
    fallback: float = getattr(FALLBACK, name)
    return median(known) if known else fallback


def _queue_ms(node: Candidate) -> float:
    return _compute_ms(node, node.queued_tokens)


def _compute_ms(node: Candidate, tokens: int) -> float:
    return 1000 * tokens / node.speeds.prefill_tokens_per_s
