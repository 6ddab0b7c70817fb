"""The default number of blocks in a chunk, against values computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.layout import (
    CHUNK_MAX_BLOCKS,
    KVLayout,
    allocator_class,
    charged_bytes,
    default_chunk_blocks,
    value_waste,
)

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("size", "charged"),
    [
        (64, 64),
        (65, 80),
        (1000, 1024),
        (1025, 1280),
        (16 * KIB, 16 * KIB),
        (16 * KIB + 1, 20 * KIB),
        (2 * MIB, 2 * MIB),
        (2 * MIB + 1, 2560 * KIB),
        (2560 * KIB + 1, 3 * MIB),
        (3 * MIB + 1, 3584 * KIB),
        (3584 * KIB + 1, 4 * MIB),
    ],
)
def test_the_allocator_has_four_size_classes_per_power_of_two(size: int, charged: int) -> None:
    assert allocator_class(size) == charged


@given(st.integers(64, 1 << 26))
def test_a_size_class_is_at_most_a_quarter_larger_than_the_size(size: int) -> None:
    charged = allocator_class(size)
    assert size <= charged <= size * 1.25 + 1
    assert allocator_class(charged) == charged


@pytest.mark.parametrize(
    ("payload", "charged"),
    [
        (2 * MIB, 2560 * KIB),
        (2 * MIB - 106, 2 * MIB),
        (2 * MIB - 105, 2560 * KIB),
        (1792 * KIB, 2 * MIB),
        (1440 * KIB, 1536 * KIB),
    ],
)
def test_a_value_is_charged_with_its_header_and_the_overhead_of_redis(
    payload: int, charged: int
) -> None:
    assert charged_bytes(payload) == charged
    assert value_waste(payload) == charged / payload - 1.0


@pytest.mark.parametrize(
    ("block_kib", "shards", "blocks", "charged_kib"),
    [
        # 16 tokens of 45 KiB: 2 blocks fill 1,440 of 1,536 KiB, 3 fill 2,160 of 2,560; 4 waste
        # no less.
        (720, 1, 2, 1536),
        # Blocks half as large: 7 fill 2,520 of 2,560 KiB, 5 points better than 1,440 of 1,536.
        (360, 1, 7, 2560),
        # A power of two wastes a quarter, three times a power of two less; 7 blocks are 2 points
        # better than 6.
        (64, 1, 8, 640),
        (128, 1, 8, 1280),
        (256, 1, 6, 1792),
        (512, 1, 3, 1792),
        (1024, 1, 3, 3584),
        (2048, 1, 1, 2560),  # Llama-8B
        (4096, 1, 1, 5120),
        (1792, 1, 1, 2048),  # Qwen3-0.6B: 2 blocks would fill 3,584 of 4,096, the same share
        (5120, 1, 1, 6144),  # Llama-70B: one block exceeds 4 MiB, and a chunk has at least one
        (5120, 4, 3, 4096),  # a shard is a quarter of each block: 3,840 of 4,096
        (2048, 2, 3, 3584),
    ],
)
def test_a_chunk_has_the_fewest_blocks_that_waste_little_memory(
    block_kib: int, shards: int, blocks: int, charged_kib: int
) -> None:
    assert default_chunk_blocks(block_kib * KIB, shards) == blocks
    assert charged_bytes(block_kib * KIB * blocks // shards) == charged_kib * KIB


@pytest.mark.parametrize("block_bytes", [1, 100, 100 * KIB])
def test_small_blocks_give_chunks_of_eight_blocks(block_bytes: int) -> None:
    assert default_chunk_blocks(block_bytes) == CHUNK_MAX_BLOCKS


@given(st.integers(1, 16 * MIB), st.sampled_from([1, 2, 4, 8]))
def test_a_chunk_has_1_to_8_blocks_and_if_possible_1_to_4_mib(share: int, shards: int) -> None:
    blocks = default_chunk_blocks(share * shards, shards)
    assert 1 <= blocks <= 8
    assert blocks * share >= MIB or blocks == 8
    assert blocks == 1 or blocks * share <= 4 * MIB


def test_a_layout_reports_the_share_of_memory_its_values_waste() -> None:
    llama = KVLayout(
        num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", chunk_blocks=1
    )
    assert llama.shard_bytes == 2 * MIB
    assert llama.waste == 0.25
