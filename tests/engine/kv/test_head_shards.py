"""The head shards of blocks on a device: gathered and scattered as the CPU's copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_engine.kv.head_shards import HeadShards
from baton_protocol.layout import KVField, KVGroup, KVLayout

# Blocks of the second group have 128 bytes unused; its K and V have different sizes.
LAYOUT = KVLayout(
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    dtype="float32",
    chunk_blocks=2,
    kv_shards=2,
    groups=(
        KVGroup((0, 2)),
        KVGroup((1,), fields=(KVField("k", 4, 8, "float32"), KVField("v", 4, 6, "float32"))),
    ),
)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("shard", [0, 1])
def test_shards_gathered_on_a_device_are_those_that_a_cpu_copies(group: int, shard: int) -> None:
    pool = torch.randint(0, 256, (8, LAYOUT.block_bytes), dtype=torch.uint8)
    shards, blocks = HeadShards(pool, LAYOUT, group), [5, 2]
    gathered = shards.gather(torch.tensor(blocks), shard)
    copied = np.empty(gathered.shape, np.uint8)
    for part, places in shards.pieces(copied, shard):
        part[:] = places[blocks]
    np.testing.assert_array_equal(gathered.numpy(), copied)

    target = torch.zeros_like(pool)
    HeadShards(target, LAYOUT, group).scatter(gathered, torch.tensor([1, 6]), shard)
    other = HeadShards(target, LAYOUT, group)
    assert torch.equal(other.gather(torch.tensor([1, 6]), shard), gathered)
    assert not other.gather(torch.tensor([1, 6]), 1 - shard).any()
    assert not target[[0, 2, 3, 4, 5, 7]].any()
