"""How a node says in one line what travels, and what the store loses by it."""

from __future__ import annotations

import pytest

from baton_node.server.transfer_summary import chunk_line
from baton_protocol.layout import KVLayout


def layout(heads: int, dim: int, chunk_blocks: int, kv_shards: int = 1) -> KVLayout:
    return KVLayout(
        num_layers=16,
        num_kv_heads=heads,
        head_dim=dim,
        block_size=16,
        dtype="float32",
        chunk_blocks=chunk_blocks,
        kv_shards=kv_shards,
    )


@pytest.mark.parametrize(
    ("given", "start"),
    [
        (layout(2, 64, 6), "chunks: 6 blocks of 16 tokens, 1.5 MiB, "),
        (layout(2, 64, 6, 2), "chunks: 6 blocks of 16 tokens, 1.5 MiB in 2 shards, "),
        (layout(1, 8, 1), "chunks: 1 block of 16 tokens, 16 KiB, "),
    ],
)
def test_the_line_tells_size_and_loss(given: KVLayout, start: str) -> None:
    line = chunk_line(given)
    assert line.startswith(start)
    assert line.removeprefix(start) == f"{100 * given.waste:.1f} % lost to the store's allocator"
