"""The byte layout of one block of KV, the groups of layers, and the number of blocks in a chunk.

A layer keeps some fields of each token (see KVField): K and V, or one latent row. Layers form
groups (see KVGroup). One block holds the KV of `block_size` tokens in the layers of one group, so
each `block_size` tokens take one block per group. The payload of a block is
`[layer of the group][field][head][token][number]`, little-endian, each field in its dtype. The KV
store treats a block as opaque bytes; only the engine's blocks and kernels know the shape.

The blocks of all groups are of one size, that of the largest group, so that any free block serves
any group. The rest of a smaller group's block is unused, but stored and sent like its KV: the
engine forms groups such that this is little (see baton_engine.memory.requirements).

A state that a layer keeps once per chunk (of a recurrent layer) has its place here, too: as a
KVField that says so, in a group of its own. Of each chunk, this group has one block, that of the
chunk's last tokens, and 0 for the others, as where a window has left them.

A value takes as much of a data server's memory as the size class of its allocator, not as its
bytes. Blocks tend to have the worst sizes: 2 MiB and a header take 2.5 MiB. The rule of
`default_chunk_blocks` keeps this waste small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from baton_protocol.figures import Size
from baton_protocol.ids import BlockId

LAYOUT_VERSION = 1
ITEM_BYTES = {
    **{"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1},
    **{"int8": 1, "float8_e4m3fn": 1},  # CODES
}
# Dtypes of fields that have a field of EXPONENTS beside them.
CODES = ("int8", "float8_e4m3fn")
DTYPE = rf"^({'|'.join(ITEM_BYTES)})\Z"
CHUNK_LEAST_BYTES = 1 << 20
CHUNK_MOST_BYTES = 4 << 20
CHUNK_MAX_BLOCKS = 8
CHUNK_SLACK = 0.03  # extra waste accepted for a smaller chunk, as a share of the payload
VALUE_HEADER_BYTES = 96  # before each payload in the store (see baton_kvstore.data.chunk_format)
# The name of the field of layers that keep one row per token instead of K and V.
LATENT = "latent"
# The end of the name of a field that has, for each row of codes of another field, their exponent.
EXPONENTS = "_exponents"
# How the store has the numbers of a block: as they are, or as the codes of in_codes().
StoreCodec = Literal["none", "int8"]
STRING_BYTES = 10  # what Redis adds to a long string (sds: lengths, type, and a NUL)


class KVField(msgspec.Struct, frozen=True):
    """What a layer keeps of each token: `heads` rows of `size` numbers. A head shard of the store
    has an equal part of the rows."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    heads: Size
    size: Size
    dtype: Annotated[str, Meta(pattern=DTYPE)]

    @property
    def row_bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.heads * self.row_bytes


def keys_and_values(heads: int, size: int, dtype: str) -> tuple[KVField, ...]:
    """The fields of a layer whose K and V have the same shape."""
    return KVField("k", heads, size, dtype), KVField("v", heads, size, dtype)


def in_codes(fields: Sequence[KVField], code: str) -> tuple[KVField, ...]:
    """The same fields as 8-bit codes of dtype `code`, each followed by the exponents of its rows
    (see baton_engine.kv.eight_bits)."""
    return tuple(
        part
        for field in fields
        for part in (
            KVField(field.name, field.heads, field.size, code),
            KVField(field.name + EXPONENTS, field.heads, 1, "int8"),
        )
    )


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV is in the same blocks. Layer `layers[i]` is layer i of the block's payload.

    With a `window` w, the query at position i sees the keys at positions j > i - w only, so the
    group needs no KV of earlier tokens. Its layers keep `fields`, or without these the fields of
    the layout. A group without fields is encoded as before groups could have them.
    """

    layers: tuple[int, ...]
    window: int | None = None
    fields: tuple[KVField, ...] | msgspec.UnsetType = msgspec.UNSET


class KVLayout(msgspec.Struct, frozen=True):
    """Geometry of the paged cache. Every field is part of the fingerprint.

    Layers keep `fields`, except those of a group with fields of its own. Without `fields`, a layer
    keeps K and V, each of `num_kv_heads` heads with `head_dim` numbers in `dtype` (see
    `kv_fields`). With these, the three describe the first field, for readers of protocol version 5.

    `block_size` is in tokens, `chunk_blocks` in multiples of `block_size` tokens. The store splits
    a chunk into `kv_shards` values along the heads of each field. With a `codec`, it has the blocks
    in another layout, `stored`, and the cache holds only numbers that encoding does not change.
    Without `groups`, all layers form one group without a window (see `kv_groups`). Groups without a
    window come first.

    A sequence's blocks are one flat list, `blocks[i * G + g]` with G = `num_groups`: the block of
    group g for tokens [i * block_size, (i + 1) * block_size). It is 0 where the sequence holds no
    block because the group's window has left these tokens.
    """

    num_layers: Size
    num_kv_heads: Size
    head_dim: Size
    block_size: Size
    dtype: Annotated[str, Meta(pattern=DTYPE)]
    chunk_blocks: Size
    kv_shards: Size = 1
    codec: StoreCodec = "none"
    version: Size = LAYOUT_VERSION
    groups: tuple[KVGroup, ...] = ()
    fields: tuple[KVField, ...] = ()

    @classmethod
    def of_fields(cls, fields: tuple[KVField, ...], **others: Any) -> Self:
        """The layout of layers that keep these fields; `others` are further fields of KVLayout."""
        first = fields[0]
        shape = first.heads, first.size, first.dtype
        return cls(
            num_kv_heads=first.heads,
            head_dim=first.size,
            dtype=first.dtype,
            fields=() if fields == keys_and_values(*shape) else fields,
            **others,
        )

    @property
    def kv_fields(self) -> tuple[KVField, ...]:
        """What a layer keeps of each token, in the order of a block's payload, if its group has no
        fields of its own; at least one."""
        return self.fields or keys_and_values(self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def group_fields(self) -> tuple[tuple[KVField, ...], ...]:
        """For each group, what its layers keep of each token."""
        shared = self.kv_fields
        return tuple(group.fields or shared for group in self.kv_groups)

    @property
    def divisions(self) -> tuple[int, ...]:
        """For each group, the first group whose layers keep the same fields. Blocks of the two
        are divided into head shards in the same way."""
        fields = self.group_fields
        return tuple(map(fields.index, fields))

    def in_dtype(self, dtype: str) -> Self:
        """The layout with all fields in this dtype, or in codes of it. Not for a layout that has
        codes."""
        assert self.dtype not in CODES, "the layout has codes already"
        coded = dtype in CODES

        def changed(fields: tuple[KVField, ...]) -> tuple[KVField, ...]:
            kept = tuple(msgspec.structs.replace(field, dtype=dtype) for field in fields)
            return in_codes(kept, dtype) if coded else kept

        groups = tuple(
            msgspec.structs.replace(group, fields=changed(group.fields)) if group.fields else group
            for group in self.groups
        )
        fields = changed(self.kv_fields if coded else self.fields)
        return msgspec.structs.replace(self, dtype=dtype, fields=fields, groups=groups)

    @property
    def stored(self) -> Self:
        """The layout of the store's payloads: this one, or with a codec that of its codes."""
        if self.codec == "none":
            return self
        groups = tuple(
            msgspec.structs.replace(group, fields=in_codes(group.fields, self.codec))
            if group.fields
            else group
            for group in self.groups
        )
        fields = in_codes(self.kv_fields, self.codec)
        return msgspec.structs.replace(
            self, dtype=self.codec, fields=fields, groups=groups, codec="none"
        )

    @property
    def undivided(self) -> KVField | None:
        """A field whose heads `kv_shards` does not divide; None if it divides those of all."""
        shards = self.kv_shards
        fields = (field for fields in self.group_fields for field in fields)
        return next((field for field in fields if shards < 1 or field.heads % shards), None)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The groups; at least one."""
        return self.groups or (KVGroup(tuple(range(self.num_layers))),)

    @property
    def num_groups(self) -> int:
        return max(1, len(self.groups))

    @property
    def layer_places(self) -> tuple[tuple[int, int], ...]:
        """For each layer, its group and its index in the payload of that group's blocks."""
        places = {
            layer: (number, index)
            for number, group in enumerate(self.kv_groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(self.num_layers))

    @property
    def num_full_groups(self) -> int:
        """Number of groups without a window."""
        return sum(group.window is None for group in self.kv_groups)

    @property
    def window(self) -> int | None:
        """The longest window of a group; None if no group has one."""
        return max((group.window for group in self.groups if group.window), default=None)

    def window_start(self, computed: int) -> int:
        """The first token whose KV the groups with a window still need once the first `computed`
        tokens are computed: the query at position p sees the keys from p + 1 - window on."""
        return 0 if self.window is None else max(0, computed + 1 - self.window)

    def tokens_in(self, blocks: int) -> int:
        """Number of tokens whose KV `blocks` blocks hold in all groups."""
        return blocks // self.num_groups * self.block_size

    def layer_bytes(self, group: int = 0) -> int:
        """Bytes of one layer in a block of this group: the fields of `block_size` tokens."""
        return self.block_size * sum(field.token_bytes for field in self.group_fields[group])

    def layer_slots(self, group: int = 0) -> int:
        """Number of layers for which a block of this group has room."""
        return self.block_bytes // self.layer_bytes(group)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: `block_size` tokens in the layers of the largest group."""
        return self.block_size * max(
            len(group.layers) * sum(field.token_bytes for field in fields)
            for group, fields in zip(self.kv_groups, self.group_fields, strict=True)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token, over all groups."""
        return self.num_groups * self.block_bytes // self.block_size

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of one block in the store."""
        return self.stored.block_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes in the store of a chunk with the blocks of all groups."""
        return self.num_groups * self.stored_block_bytes * self.chunk_blocks

    def chunk_of(self, blocks: Sequence[BlockId], index: int) -> tuple[BlockId, ...]:
        """The blocks of chunk `index` of a sequence's flat list `blocks`, in the order of the
        chunk's payload: `[group][block]`, so the groups without a window come first. A chunk at
        the end of a shorter list has fewer blocks."""
        groups, span = self.num_groups, self.chunk_blocks * self.num_groups
        chunk = blocks[index * span : (index + 1) * span]
        return tuple(block for group in range(groups) for block in chunk[group::groups])

    @property
    def full_groups_bytes(self) -> int:
        """Bytes in the store of a chunk with the blocks of the groups without a window only."""
        return self.num_full_groups * self.stored_block_bytes * self.chunk_blocks

    def first_complete(self, chunks: int) -> int:
        """The first of a request's `chunks` full chunks that must have the blocks of all groups.

        A node that has these chunks computes the tokens after them, or their last token again. The
        groups with a window need the last `window` tokens of the chunks for it, and none before.
        """
        last = chunks * self.chunk_tokens - 1
        return self.window_start(last) // self.chunk_tokens

    @property
    def shard_bytes(self) -> int:
        """Payload bytes of one stored value: one head shard of a chunk."""
        return self.chunk_bytes // self.kv_shards

    @property
    def chunk_tokens(self) -> int:
        return self.block_size * self.chunk_blocks

    @property
    def waste(self) -> float:
        """Memory that a data server uses for a value beyond its payload, as a share of the
        payload."""
        return value_waste(max(1, self.shard_bytes))


def allocator_class(size: int) -> int:
    """Return the bytes that jemalloc allocates for a request of `size` bytes (64 or more): the next
    larger of 2^k * {1, 1.25, 1.5, 1.75}."""
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


def charged_bytes(payload: int) -> int:
    """Return the bytes of a data server's memory that a value with this payload takes, without its
    key."""
    return allocator_class(VALUE_HEADER_BYTES + payload + STRING_BYTES)


def value_waste(payload: int) -> float:
    """Return the memory beyond the payload as a share of it. 0.25: a quarter more than the
    payload."""
    return charged_bytes(payload) / payload - 1.0


def default_chunk_blocks(block_bytes: int, kv_shards: int = 1) -> int:
    """Return the smallest number of blocks per chunk that wastes little of the store's memory.

    Candidates are 1 to 8 blocks for which one value (one head shard) has 1 to 4 MiB, or the nearest
    number if there are none. The result is the smallest candidate whose waste is within 3
    percentage points of the least.
    """
    value_bytes = block_bytes // kv_shards
    low = min(CHUNK_MAX_BLOCKS, -(-CHUNK_LEAST_BYTES // value_bytes))
    high = max(low, min(CHUNK_MAX_BLOCKS, CHUNK_MOST_BYTES // value_bytes))
    wastes = {blocks: value_waste(blocks * value_bytes) for blocks in range(low, high + 1)}
    accepted = min(wastes.values()) + CHUNK_SLACK
    return next(blocks for blocks, waste in wastes.items() if waste <= accepted)
