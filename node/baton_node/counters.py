"""Counters of one node's transfers, beside the engine's own.

In: what the step loop sees happen. Out: the node's NodeLoad: the engine's figures with these added.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton_protocol.store import NodeLoad


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
    handoffs: int = 0

    def merge(self, engine: NodeLoad, parked: int) -> NodeLoad:
        """The node's load: `engine` is Engine.load()."""
        return msgspec.structs.replace(
            engine,
            parked=parked,
            published_bytes_total=self.published_bytes,
            published_chunks_total=self.published_chunks,
            announced_chunks_total=self.announced_chunks,
            fetched_bytes_total=self.fetched_bytes,
            fetched_chunks_total=self.fetched_chunks,
            reused_chunks_total=self.reused_chunks,
            lost_chunks_total=self.lost_chunks,
            handoffs_total=self.handoffs,
        )
