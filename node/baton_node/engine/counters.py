"""Counts of the engine process since its start.

In: what the step loop's parts count. Out: the counters of NodeLoad.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec

from baton_protocol.store import NodeLoad


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Counts of one request's full blocks, as in NodeLoad: looked up; found in this node's cache or
    with a marker; fetched from the store; used by the request; found in the store, but declined
    because computing them was cheaper."""

    queried: int = 0
    matched: int = 0
    fetched: int = 0
    used: int = 0
    declined: int = 0


@dataclass(slots=True)
class Counters:
    """Counts since the node's start. The fields are those of NodeLoad without `_total`."""

    published_bytes: int = 0
    published_chunks: int = 0
    announced_chunks: int = 0
    fetched_bytes: int = 0
    fetched_chunks: int = 0
    reused_chunks: int = 0
    lost_chunks: int = 0
    queried_blocks: int = 0
    matched_blocks: int = 0
    fetched_blocks: int = 0
    used_blocks: int = 0
    declined_blocks: int = 0
    behind_chunks: int = 0
    behind_bytes: int = 0
    behind_skipped: int = 0
    handoffs: int = 0
    jobs: int = 0
    grammars_compiled: int = 0
    grammar_hits: int = 0
    grammar_compile_seconds: float = 0.0

    def count(self, tally: BlockCounts) -> None:
        """Add the counts of one request. Call it once per request."""
        self.queried_blocks += tally.queried
        self.matched_blocks += tally.matched
        self.fetched_blocks += tally.fetched
        self.used_blocks += tally.used
        self.declined_blocks += tally.declined

    def merge(self, engine: NodeLoad, parked: int, parked_tokens: int) -> NodeLoad:
        """Return the node's load. `engine` is the result of Engine.load(); `parked` counts parked
        sequences, `parked_tokens` the tokens that this node will compute for them."""
        totals = {f"{name}_total": value for name, value in asdict(self).items()}
        queued = engine.queued_tokens + parked_tokens
        return msgspec.structs.replace(engine, parked=parked, queued_tokens=queued, **totals)
