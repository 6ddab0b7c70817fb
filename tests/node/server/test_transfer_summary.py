"""The log line about a chunk: its size, and the memory that the store's allocator wastes."""

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
    ("kv_layout", "start"),
    [
        (layout(2, 64, 6), "chunks: 6 blocks of 16 tokens, 1.5 MiB, "),
        (layout(2, 64, 6, 2), "chunks: 6 blocks of 16 tokens, 1.5 MiB in 2 shards, "),
        (layout(1, 8, 1), "chunks: 1 block of 16 tokens, 16 KiB, "),
    ],
)
def test_the_line_has_the_chunk_s_size_and_the_wasted_memory(
    kv_layout: KVLayout, start: str
) -> None:
    line = chunk_line(kv_layout)
    assert line.startswith(start)
    assert (
        line.removeprefix(start) == f"{100 * kv_layout.waste:.1f} % lost to the store's allocator"
    )
