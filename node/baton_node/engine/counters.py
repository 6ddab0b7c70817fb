"""Counts of the engine process since its start.

In: what the step loop's parts count. Out: the counters of NodeLoad.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton_protocol.store import NodeLoad

SUFFIX = "_total"


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


class Counters:
    """The counters of NodeLoad, by their names there without `_total`."""

    def __init__(self) -> None:
        names = (name for name in NodeLoad.__struct_fields__ if name.endswith(SUFFIX))
        self._counts: dict[str, float] = {name.removesuffix(SUFFIX): 0 for name in names}

    def __getitem__(self, name: str) -> float:
        return self._counts[name]

    def add(self, **counts: float) -> None:
        """Add to counters. A name that is none raises KeyError."""
        for name, count in counts.items():
            self._counts[name] += count

    def add_blocks(self, blocks: BlockCounts) -> None:
        """Add the blocks of one request. Call it once per request."""
        self.add(
            queried_blocks=blocks.queried,
            matched_blocks=blocks.matched,
            fetched_blocks=blocks.fetched,
            used_blocks=blocks.used,
            declined_blocks=blocks.declined,
        )

    def set_to(self, **counts: float) -> None:
        """Set counters that another object counts. A name that is none raises KeyError."""
        if unknown := counts.keys() - self._counts.keys():
            raise KeyError(*sorted(unknown))
        self._counts |= counts

    def merge(self, engine: NodeLoad, parked: int, parked_tokens: int) -> NodeLoad:
        """Return the node's load. `engine` is the result of EngineCore.load(); `parked` counts
        parked sequences, `parked_tokens` the tokens that this node will compute for them."""
        own = {f"{name}{SUFFIX}": count for name, count in self._counts.items() if count}
        sums = {field: getattr(engine, field) + count for field, count in own.items()}
        queued = engine.queued_tokens + parked_tokens
        return msgspec.structs.replace(engine, parked=parked, queued_tokens=queued, **sums)
