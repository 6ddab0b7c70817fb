"""The KV pool as bytes: block order, layout of a block and threads, on the CPU and on CUDA."""

from __future__ import annotations

import os
import threading

import msgspec
import numpy as np
import pytest
import torch

from baton_engine.errors import SettingsError
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import ITEM_BYTES, KVField, KVGroup, KVLayout
from tests.support.engines.demands import kv_layout
from tests.support.engines.small_pool import kv_of

CPU = torch.device("cpu")
DEVICES = [
    pytest.param("cpu"),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu"),
        ],
    ),
]


def layout_of(dtype: str = "float32", heads: int = 2, shards: int = 1) -> KVLayout:
    return kv_layout(layers=3, heads=heads, dim=8, dtype=dtype, chunk=2, shards=shards)


def blocks_of(*ids: int) -> list[BlockId]:
    return [BlockId(id) for id in ids]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_read_in_the_requested_order(device: str, dtype: str) -> None:
    layout = layout_of(dtype)
    memory = TorchMemory(layout, 10, torch.device(device))
    size = layout.block_bytes
    data = os.urandom(3 * size)
    memory.write(blocks_of(7, 2, 10), memoryview(data))
    actual = bytearray(4 * size)
    memory.read(blocks_of(10, 7, 3, 2), memoryview(actual))
    assert actual == data[2 * size :] + data[:size] + bytes(size) + data[size : 2 * size]


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_is_layer_then_k_and_v_then_head_then_token_then_dim(device: str) -> None:
    layout = layout_of()
    memory = TorchMemory(layout, 4, torch.device(device))
    shape = (3, 2, 2, 4, 8)
    values = torch.arange(3 * 2 * 2 * 4 * 8, dtype=torch.float32).view(shape)
    memory.write(blocks_of(3), memoryview(values.numpy().tobytes()))
    assert kv_of(memory).shape == (5, *shape)
    assert torch.equal(kv_of(memory)[3].cpu(), values)
    assert not memory.pool[2].any()


# Fields (name, heads, numbers, dtype) in the order of a block.
FIELDS = {
    "latent rows": [("latent", 1, 24, "float32")],
    "v of another size": [("k", 2, 24, "bfloat16"), ("v", 2, 8, "bfloat16")],
    "8 bits and scales": [
        *(("k", 2, 24, "uint8"), ("v", 2, 8, "uint8")),
        *(("k_scale", 2, 1, "float32"), ("v_scale", 2, 1, "float32")),
    ],
}


# Groups of layers with other fields than the rest; after the second group's layer, 128 bytes of a
# block are unused.
MIXED = (
    KVGroup((0, 2)),
    KVGroup((1,), fields=(KVField("k", 4, 8, "float32"), KVField("v", 4, 6, "float32"))),
)


def mixed_layout(shards: int = 1) -> KVLayout:
    layout = layout_of(heads=2, shards=shards)
    return msgspec.structs.replace(layout, groups=MIXED)


def fields_layout(name: str, shards: int = 1) -> KVLayout:
    return KVLayout.of_fields(
        tuple(KVField(*field) for field in FIELDS[name]),
        num_layers=3,
        block_size=4,
        chunk_blocks=2,
        kv_shards=shards,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_a_view_of_its_bytes_in_each_layer(device: str, name: str) -> None:
    layout = fields_layout(name)
    memory = TorchMemory(layout, 4, torch.device(device))
    data = os.urandom(layout.block_bytes)
    memory.write(blocks_of(3), memoryview(data))
    layers = np.frombuffer(data, np.uint8).reshape(3, -1)
    begin = 0
    for field in layout.kv_fields:
        size = layout.block_size * field.token_bytes
        expected = layers[:, begin : begin + size].reshape(3, field.heads, layout.block_size, -1)
        view = memory.fields[field.name]
        assert view.shape == (5, 3, field.heads, layout.block_size, field.size)
        actual = view[3].cpu().contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(actual, expected)
        assert not view[2].any()
        begin += size
    assert begin == layout.layer_bytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["v of another size", "8 bits and scales"])
def test_a_shard_has_its_heads_of_each_field(device: str, name: str) -> None:
    layout = fields_layout(name, shards=2)
    source, target = (TorchMemory(layout, 10, torch.device(device)) for _ in range(2))
    for field in source.fields.values():
        noise = torch.randint(0, 100, field.shape, device=device)
        field.copy_(noise)
    for shard in (1, 0):
        part = read(source, blocks_of(4, 9), shard)
        expected = b"".join(
            field[block, layer, shard].cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for block in (4, 9)
            for layer in range(3)
            for field in source.fields.values()
        )
        assert part == expected
        target.write(blocks_of(3, 8), memoryview(part), shard)
    assert torch.equal(target.pool[[3, 8]], source.pool[[4, 9]])
    assert not target.pool[[0, 1, 2, 4, 5, 6, 7, 9, 10]].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shards", [1, 2])
def test_groups_with_other_fields_have_views_and_shards_of_their_own(
    device: str, shards: int
) -> None:
    layout = mixed_layout(shards)
    assert [layout.layer_slots(group) for group in (0, 1)] == [2, 1]
    assert (layout.block_bytes, layout.layer_bytes(1)) == (1024, 896)
    source, target = (TorchMemory(layout, 10, torch.device(device)) for _ in range(2))
    source.pool.copy_(torch.randint(0, 256, source.pool.shape, device=device))
    for group, (block, other) in enumerate([(4, 3), (9, 8)]):
        for shard in range(shards):
            part = read(source, blocks_of(block), shard, group)
            cut = [
                field[block, layer].cpu().chunk(shards)[shard].numpy().tobytes()
                for layer in range(layout.layer_slots(group))
                for field in source.group_fields[group].values()
            ]
            expected = b"".join(cut)
            assert part[: len(expected)] == expected
            target.write(blocks_of(other), memoryview(part), shard, group)
    assert torch.equal(target.pool[[3, 8]], source.pool[[4, 9]])
    assert not target.pool[[0, 1, 2, 4, 5, 6, 7, 9, 10]].any()


def test_a_field_that_begins_inside_a_number_is_refused() -> None:
    fields = KVField("k", 1, 3, "uint8"), KVField("v", 1, 4, "float32")
    layout = KVLayout.of_fields(fields, num_layers=1, block_size=1, chunk_blocks=1)
    with pytest.raises(SettingsError, match=r"v begins at byte 3 of 19 .* --block-size"):
        TorchMemory(layout, 4, CPU)


# --- head shards --------------------------------------------------------------------------------

# (number of KV heads, number of shards)
HEADS_AND_SHARDS = [(1, 1), (2, 1), (2, 2), (8, 1), (8, 2), (3, 3), (6, 2)]


def shards_of(layout: KVLayout, block: bytes) -> list[bytes]:
    """A block's shards, cut out by slicing bytes."""
    head = layout.block_size * layout.head_dim * ITEM_BYTES[layout.dtype]
    share = layout.num_kv_heads // layout.kv_shards * head
    pieces = [block[at : at + share] for at in range(0, len(block), share)]
    return [b"".join(pieces[shard :: layout.kv_shards]) for shard in range(layout.kv_shards)]


def read(memory: TorchMemory, blocks: list[BlockId], shard: int, group: int = 0) -> bytes:
    layout = memory.layout
    data = bytearray(len(blocks) * layout.block_bytes // layout.kv_shards)
    memory.read(blocks, memoryview(data), shard, group)
    return bytes(data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "shards"), HEADS_AND_SHARDS)
def test_a_shard_is_the_k_and_v_of_its_heads_in_each_layer(
    device: str, dtype: str, heads: int, shards: int
) -> None:
    layout = layout_of(dtype, heads, shards)
    unsharded = TorchMemory(layout_of(dtype, heads), 10, torch.device(device))
    memory = TorchMemory(layout, 10, torch.device(device))
    size = layout.block_bytes
    data = os.urandom(3 * size)
    unsharded.write(blocks_of(7, 2, 10), memoryview(data))
    memory.pool.copy_(unsharded.pool)
    cut = [shards_of(layout, data[at : at + size]) for at in range(0, 3 * size, size)]
    for shard in range(shards):
        expected = b"".join(cut[index][shard] for index in (2, 0, 1))
        assert read(memory, blocks_of(10, 7, 2), shard) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "shards"), HEADS_AND_SHARDS)
def test_shards_that_are_read_and_written_one_by_one_make_whole_blocks(
    device: str, dtype: str, heads: int, shards: int
) -> None:
    layout = layout_of(dtype, heads, shards)
    source, target = (TorchMemory(layout, 10, torch.device(device)) for _ in range(2))
    unsharded = TorchMemory(layout_of(dtype, heads), 10, torch.device(device))
    data = os.urandom(3 * layout.block_bytes)
    unsharded.write(blocks_of(4, 9, 1), memoryview(data))
    source.pool.copy_(unsharded.pool)
    for shard in reversed(range(shards)):
        part = read(source, blocks_of(4, 9, 1), shard)
        target.write(blocks_of(3, 8, 5), memoryview(part), shard)
    unsharded.pool.copy_(target.pool)
    assert read(unsharded, blocks_of(3, 8, 5), 0) == data
    assert not unsharded.pool[[0, 1, 2, 4, 6, 7, 9, 10]].any()


def test_views_share_memory_with_the_blocks_in_the_requested_order() -> None:
    layout = layout_of("bfloat16")
    memory = TorchMemory(layout, 10, CPU)
    views = memory.views(blocks_of(7, 2))
    assert views is not None
    seventh, second = (os.urandom(layout.block_bytes) for _ in range(2))
    views[0][:], views[1][:] = seventh, second
    assert read(memory, blocks_of(2, 7), 0) == second + seventh
    assert not memory.pool[[0, 1, 3, 4, 5, 6, 8, 9, 10]].any()
    memory.clear(blocks_of(2))
    assert views[0] == seventh
    assert not any(views[1])


def test_a_pool_with_head_shards_has_no_views() -> None:
    assert TorchMemory(layout_of(shards=2), 4, CPU).views(blocks_of(1)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_a_gpu_pool_has_no_views() -> None:
    assert TorchMemory(layout_of(), 4, torch.device("cuda")).views(blocks_of(1)) is None


@pytest.mark.parametrize("device", DEVICES)
def test_clear_zeroes_exactly_the_given_blocks(device: str) -> None:
    layout = layout_of()
    memory = TorchMemory(layout, 4, torch.device(device))
    memory.write(blocks_of(1, 2, 3), memoryview(bytes([1]) * (3 * layout.block_bytes)))
    memory.clear(blocks_of(1, 3))
    assert [bool(memory.pool[block].any()) for block in (1, 2, 3)] == [False, True, False]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shards", [1, 2])
def test_threads_can_read_and_write_different_shards_of_a_block_concurrently(
    device: str, shards: int
) -> None:
    layout = layout_of(shards=shards)
    memory = TorchMemory(layout, 8, torch.device(device))
    wrong: list[int] = []

    def work(first: int, shard: int) -> None:
        mine = blocks_of(*range(first, first + 4))
        for _ in range(50):
            data = os.urandom(4 * layout.block_bytes // shards)
            memory.write(mine, memoryview(data), shard)
            if read(memory, mine, shard) != data:
                wrong.append(first)

    threads = [
        threading.Thread(target=work, args=(first, shard))
        for first in (1, 5)
        for shard in range(shards)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    memory = TorchMemory(layout_of(), 4, CPU)
    with pytest.raises(ValueError, match="reshape"):
        memory.read(blocks_of(1, 2), memoryview(bytearray(layout_of().block_bytes)))


def test_the_error_for_a_pool_larger_than_memory_names_the_flags() -> None:
    with pytest.raises(SettingsError, match="--kv-memory, --kv-blocks or --gpu-memory-utilization"):
        TorchMemory(layout_of(), 1 << 50, CPU)
