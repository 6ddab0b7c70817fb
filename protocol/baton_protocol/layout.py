"""What one block of KV is, as bytes, and how many of them make a chunk.

The payload of a block is `[layer][K,V][kv_head][token][dim]`, little-endian, in the cache's dtype.
To the exchange a block is opaque; only the engine's blocks and kernels know the shape.

A data server does not pay for a value's bytes but for the allocator's class that they fall in, and
blocks tend to have the worst of sizes: 2 MiB and a header cost 2.5 MiB. Hence the rule of
`default_chunk_blocks`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton_protocol.figures import Size, Text

LAYOUT_VERSION = 1
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
DTYPE = rf"^({'|'.join(ITEM_BYTES)})\Z"
CHUNK_LEAST_BYTES = 1 << 20
CHUNK_MOST_BYTES = 4 << 20
CHUNK_MAX_BLOCKS = 8
CHUNK_SLACK = 0.03  # so much more waste is accepted for a smaller chunk
VALUE_HEADER_BYTES = 96  # in front of each payload in the store (kvstore's `chunk` says what)
STRING_BYTES = 10  # what Redis keeps with a long string (sds: lengths and type, and a NUL)


class KVLayout(msgspec.Struct, frozen=True):
    """Geometry of the paged cache; part of the fingerprint."""

    num_layers: Size
    num_kv_heads: Size
    head_dim: Size
    block_size: Size
    dtype: Annotated[str, Meta(pattern=DTYPE)]
    chunk_blocks: Size
    kv_shards: Size = 1
    codec: Text = "none"
    version: Size = LAYOUT_VERSION

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
    def shard_bytes(self) -> int:
        """Payload of one stored value: a chunk's share of one head shard."""
        return self.chunk_bytes // self.kv_shards

    @property
    def chunk_tokens(self) -> int:
        return self.block_size * self.chunk_blocks

    @property
    def waste(self) -> float:
        """Memory that a data server spends on a value beyond its payload, as a share of it."""
        return value_waste(max(1, self.shard_bytes))


def allocator_class(size: int) -> int:
    """Bytes that jemalloc hands out where `size` are asked for: the next of 2^k * {1, 1.25, 1.5,
    1.75}. Holds from 64 bytes on."""
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


def charged_bytes(payload: int) -> int:
    """Memory of a data server that a value with this payload takes, without its key."""
    return allocator_class(VALUE_HEADER_BYTES + payload + STRING_BYTES)


def value_waste(payload: int) -> float:
    """0.25: a quarter more memory than payload."""
    return charged_bytes(payload) / payload - 1.0


def default_chunk_blocks(block_bytes: int, kv_shards: int = 1) -> int:
    """The fewest blocks that waste little of the store's memory.

    Considered are 1 to 8 blocks whose value (one shard's share) has 1 to 4 MiB, or what comes next
    to that; of them the fewest whose waste is within 3 percentage points of the least.
    """
    share = block_bytes // kv_shards
    least = min(CHUNK_MAX_BLOCKS, -(-CHUNK_LEAST_BYTES // share))
    most = max(least, min(CHUNK_MAX_BLOCKS, CHUNK_MOST_BYTES // share))
    wastes = {blocks: value_waste(blocks * share) for blocks in range(least, most + 1)}
    accepted = min(wastes.values()) + CHUNK_SLACK
    return next(blocks for blocks, waste in wastes.items() if waste <= accepted)
