"""Counters of one node's transfers, beside the engine's own.

In: what the step loop sees happen. Out: the node's NodeLoad: the engine's figures with these added.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec

from baton_protocol.store import NodeLoad


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """What became of one request's full blocks (see NodeLoad): asked for, found in the own cache or
    by a marker, brought from the store, given to the engine, found and cheaper to compute."""

    queried: int = 0
    matched: int = 0
    fetched: int = 0
    used: int = 0
    declined: int = 0


@dataclass(slots=True)
class Counters:
    """Since start. Names as in NodeLoad, without `_total`."""

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

    def count(self, tally: BlockCounts) -> None:
        """Once per request."""
        self.queried_blocks += tally.queried
        self.matched_blocks += tally.matched
        self.fetched_blocks += tally.fetched
        self.used_blocks += tally.used
        self.declined_blocks += tally.declined

    def merge(self, engine: NodeLoad, parked: int, parked_tokens: int) -> NodeLoad:
        """The node's load: `engine` is Engine.load(). `parked_tokens` of the parked requests' are
        to be computed."""
        totals = {f"{name}_total": value for name, value in asdict(self).items()}
        queued = engine.queued_tokens + parked_tokens
        return msgspec.structs.replace(engine, parked=parked, queued_tokens=queued, **totals)
