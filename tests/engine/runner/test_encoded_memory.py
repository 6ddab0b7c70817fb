"""The pool's blocks as codes: the same bytes by kernels and by torch's operators, and back."""

from __future__ import annotations

import msgspec
import pytest
import torch

from baton_engine.kv.eight_bits import rounded
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.runner.encoded_memory import EncodedMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVField, KVGroup, KVLayout

CPU = torch.device("cpu")
# The blocks of each group of layers. Those of the second have room for more layers than it has.
BLOCKS = {0: [1, 3, 2], 1: [5, 4]}


def layout_of(head_dim: int, dtype: str, shards: int) -> KVLayout:
    wider = KVField("k", 4, head_dim, dtype), KVField("v", 4, 2 * head_dim, dtype)
    return KVLayout(
        num_layers=5,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=8,
        dtype=dtype,
        chunk_blocks=2,
        kv_shards=shards,
        codec="int8",
        groups=(KVGroup((0, 2, 3, 4)), KVGroup((1,), 64, wider)),
    )


def filled(layout: KVLayout) -> TorchMemory:
    memory, noise = TorchMemory(layout, 6, CPU), torch.Generator().manual_seed(0)
    for group, blocks in BLOCKS.items():
        for field in memory.group_fields[group].values():
            numbers = torch.randn(field[blocks].shape, generator=noise)
            field[blocks] = rounded(numbers.to(field.dtype))
    return memory


def stored(memory: EncodedMemory, group: int, shard: int) -> bytearray:
    """The bytes that a transfer gets, in a buffer that had others."""
    layout, blocks = memory.layout, [BlockId(block) for block in BLOCKS[group]]
    size = len(blocks) * layout.stored_block_bytes // layout.kv_shards
    data = bytearray(b"x" * size)
    memory.read(blocks, memoryview(data), shard, group)
    return data


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_blocks_are_encoded_and_decoded_without_loss(
    head_dim: int, dtype: str, shards: int
) -> None:
    layout = layout_of(head_dim, dtype, shards)
    source, target = filled(layout), TorchMemory(layout, 6, CPU)
    for group, blocks in BLOCKS.items():
        for shard in range(shards):
            data = stored(EncodedMemory(source), group, shard)
            ids = [BlockId(block) for block in blocks]
            EncodedMemory(target).write(ids, memoryview(data), shard, group)
        layers = len(layout.kv_groups[group].layers)
        for name, field in source.group_fields[group].items():
            found = target.group_fields[group][name]
            assert torch.equal(found[blocks, :layers], field[blocks, :layers])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_and_torch_s_operators_give_the_same_bytes(dtype: str) -> None:
    memory = EncodedMemory(filled(layout_of(32, dtype, 2)))
    compiled = [stored(memory, group, shard) for group in BLOCKS for shard in (0, 1)]
    for group in memory._groups:
        assert group.compiled
        group.compiled = False
    assert [stored(memory, group, shard) for group in BLOCKS for shard in (0, 1)] == compiled


def test_a_block_in_the_store_has_a_byte_per_number_and_one_per_row() -> None:
    layout = msgspec.structs.replace(layout_of(64, "bfloat16", 1), groups=())
    assert layout.stored_block_bytes == 5 * 2 * 2 * 8 * (64 + 1)
    assert layout.stored_block_bytes <= 0.52 * layout.block_bytes
    assert layout.chunk_bytes == 2 * layout.stored_block_bytes
    assert layout.stored.stored == layout.stored
