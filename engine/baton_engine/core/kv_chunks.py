"""Full blocks and full chunks of a sequence.

In: sequences. Out: their full blocks registered in the prefix cache, and Filled records for the
code that writes chunks to the store.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from baton_engine.interface import Filled
from baton_engine.kv.block_pool import BlockPool, hash_in
from baton_engine.scheduling.ranges import Run
from baton_engine.scheduling.sequence import RequestState, Sequence
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVLayout


def register(
    pool: BlockPool, blocks: Seq[BlockId], hashes: Seq[BlockHash], run: Run, layout: KVLayout
) -> None:
    """Register the spans `run` of a sequence in the prefix cache. Their KV is written and never
    changes. Chunks are reported for group 0 alone."""
    groups = layout.num_groups
    for span in range(*run):
        ends_chunk, hash = (span + 1) % layout.chunk_blocks == 0, hashes[span]
        for group in range(groups):
            block = blocks[span * groups + group]
            if block:
                key = hash_in(group, hash) if group else hash
                pool.register(block, key, ends_chunk=ends_chunk and not group)


def take_filled(sequence: Sequence, begin: int, end: int, layout: KVLayout) -> list[Filled]:
    """Return the chunks that became full when tokens [begin, end) of `sequence` were computed.

    Each chunk is returned once. Chunks that came whole from the cache or the store are left out.
    """
    size = layout.chunk_tokens
    first, full = max(sequence.reported_chunks, begin // size), sequence.computed // size
    sequence.reported_chunks = max(sequence.reported_chunks, full)
    return [_chunk(sequence, i, layout) for i in range(first, full) if i * size < end]


def full_chunks(state: RequestState, layout: KVLayout) -> tuple[Filled, ...]:
    """All full chunks that a request's choices hold, each hash once."""
    chunks: dict[BlockHash, Filled] = {}
    for sequence in state.live.values():
        for index in range(sequence.computed // layout.chunk_tokens):
            chunk = _chunk(sequence, index, layout)
            chunks.setdefault(chunk.hash, chunk)
    return tuple(chunks.values())


def _chunk(sequence: Sequence, index: int, layout: KVLayout) -> Filled:
    end = (index + 1) * layout.chunk_blocks
    return Filled(
        sequence.state.request.id,
        sequence.choice,
        index,
        hash=sequence.hash_spans(end)[end - 1],
        blocks=layout.chunk_of(sequence.blocks, index),
    )
