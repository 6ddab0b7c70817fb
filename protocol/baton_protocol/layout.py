"""What one block of KV is, as bytes.

The payload of a block is `[layer][K,V][kv_head][token][dim]`, little-endian, in the cache's dtype.
To the exchange a block is opaque; only the engine's blocks and kernels know the shape.
"""

from __future__ import annotations

import msgspec

LAYOUT_VERSION = 1
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
CHUNK_TARGET_BYTES = 1 << 20
CHUNK_MAX_BLOCKS = 8


class KVLayout(msgspec.Struct, frozen=True):
    """Geometry of the paged cache; part of the fingerprint."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    chunk_blocks: int
    kv_shards: int = 1
    codec: str = "none"
    version: int = LAYOUT_VERSION

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def chunk_bytes(self) -> int:
        return self.block_bytes * self.chunk_blocks

    @property
    def chunk_tokens(self) -> int:
        return self.block_size * self.chunk_blocks


def default_chunk_blocks(block_bytes: int) -> int:
    """The fewest blocks whose value is at least 1 MiB, at most 8."""
    return min(CHUNK_MAX_BLOCKS, -(-CHUNK_TARGET_BYTES // block_bytes))
