"""The pool as bytes: block order, layout of a block, threads; on CUDA the same by staging."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from baton_engine.errors import SettingsError
from baton_engine.torch_memory import TorchMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

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


def layout_of(dtype: str = "float32") -> KVLayout:
    return KVLayout(
        num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype, chunk_blocks=2
    )


def blocks_of(*ids: int) -> list[BlockId]:
    return [BlockId(id) for id in ids]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_written_is_read_in_the_order_asked_for(device: str, dtype: str) -> None:
    layout = layout_of(dtype)
    memory = TorchMemory(layout, 10, torch.device(device))
    size = layout.block_bytes
    data = os.urandom(3 * size)
    memory.write(blocks_of(7, 2, 10), memoryview(data))
    found = bytearray(4 * size)
    memory.read(blocks_of(10, 7, 3, 2), memoryview(found))
    assert found == data[2 * size :] + data[:size] + bytes(size) + data[size : 2 * size]


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_is_layer_then_k_and_v_then_head_then_token_then_dim(device: str) -> None:
    layout = layout_of()
    memory = TorchMemory(layout, 4, torch.device(device))
    shape = (3, 2, 2, 4, 8)
    values = torch.arange(3 * 2 * 2 * 4 * 8, dtype=torch.float32).view(shape)
    memory.write(blocks_of(3), memoryview(values.numpy().tobytes()))
    assert memory.pool.shape == (5, *shape)
    assert torch.equal(memory.pool[3].cpu(), values)
    assert not memory.pool[2].any()


@pytest.mark.parametrize("device", DEVICES)
def test_clear_zeroes_whole_blocks_and_no_others(device: str) -> None:
    layout = layout_of()
    memory = TorchMemory(layout, 4, torch.device(device))
    memory.write(blocks_of(1, 2, 3), memoryview(bytes([1]) * (3 * layout.block_bytes)))
    memory.clear(blocks_of(1, 3))
    assert [bool(memory.pool[block].any()) for block in (1, 2, 3)] == [False, True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_threads_may_read_and_write_their_own_blocks_at_once(device: str) -> None:
    layout = layout_of()
    memory = TorchMemory(layout, 16, torch.device(device))
    wrong: list[int] = []

    def work(first: int) -> None:
        mine = blocks_of(*range(first, first + 4))
        found = bytearray(4 * layout.block_bytes)
        for _ in range(50):
            data = os.urandom(4 * layout.block_bytes)
            memory.write(mine, memoryview(data))
            memory.read(mine, memoryview(found))
            if found != data:
                wrong.append(first)

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 5, 9, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    memory = TorchMemory(layout_of(), 4, CPU)
    with pytest.raises(ValueError, match="reshape"):
        memory.read(blocks_of(1, 2), memoryview(bytearray(layout_of().block_bytes)))


def test_a_pool_that_does_not_fit_the_machine_names_the_flags() -> None:
    with pytest.raises(SettingsError, match="--kv-memory or --kv-blocks"):
        TorchMemory(layout_of(), 1 << 50, CPU)
