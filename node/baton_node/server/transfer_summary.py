"""One line about a node's chunks: their size, and the memory that the store wastes on them.

In: a KVLayout. Out: text for the node's log and for `baton up`.
"""

from __future__ import annotations

from baton_protocol.layout import KVLayout

KIB, MIB = 1 << 10, 1 << 20


def chunk_line(layout: KVLayout) -> str:
    """Return for example `chunks: 6 blocks of 16 tokens, 1.5 MiB, 16.7 % lost to the store's
    allocator`."""
    size = layout.chunk_bytes
    shown = f"{size / MIB:.4g} MiB" if size >= MIB else f"{size / KIB:.4g} KiB"
    if layout.kv_shards > 1:
        shown += f" in {layout.kv_shards} shards"
    blocks = "block" if layout.chunk_blocks == 1 else "blocks"
    return (
        f"chunks: {layout.chunk_blocks} {blocks} of {layout.block_size} tokens, {shown}, "
        f"{layout.waste:.1%} lost to the store's allocator".replace("%", " %")
    )
