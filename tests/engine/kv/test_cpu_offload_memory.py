"""Copies between KV blocks and slots of host memory: bytes and order, for each kind of memory."""

from __future__ import annotations

import os

import pytest
import torch

from baton_engine.errors import SettingsError
from baton_engine.interface import KVMemory
from baton_engine.kv.host_blocks import CopiedBlocks, HostMemory
from baton_engine.kv.host_tier import HostTier
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.pinned_blocks import PinnedBlocks
from baton_engine.sim.memory import SimMemory
from baton_protocol.ids import BlockHash, BlockId
from tests.support.engines.demands import kv_layout
from tests.support.engines.fake_cuda import FakeCuda
from tests.support.engines.small_pool import kv_of

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")]
KINDS = ["sim", "cpu", "bfloat16", "pinned", pytest.param("cuda", marks=GPU)]
SLOTS = 3


def memories(kind: str, shards: int = 1) -> tuple[KVMemory, HostMemory]:
    """The KV memory and the host memory of this kind."""
    layout = kv_layout(
        layers=3,
        heads=2,
        dim=8,
        dtype="bfloat16" if kind == "bfloat16" else "float32",
        chunk=2,
        shards=shards,
    )
    if kind == "sim":
        memory = SimMemory(layout, 8)
        return memory, CopiedBlocks(memory, SLOTS)
    pool = TorchMemory(layout, 8, torch.device("cuda" if kind == "cuda" else "cpu"))
    if kind == "cuda":
        return pool, PinnedBlocks(pool, SLOTS)
    if kind == "pinned":
        return pool, PinnedBlocks(pool, SLOTS, FakeCuda().calls)
    return pool, CopiedBlocks(pool, SLOTS)


def write_random(memory: KVMemory, block: int) -> list[bytes]:
    """Fill the block with random bytes. Returns the bytes of each shard."""
    shards = range(memory.layout.kv_shards)
    data = [os.urandom(memory.layout.block_bytes // len(shards)) for _ in shards]
    for shard in shards:
        memory.write([BlockId(block)], memoryview(data[shard]), shard)
    return data


def content(memory: KVMemory, block: int) -> list[bytes]:
    shards = range(memory.layout.kv_shards)
    data = [bytearray(memory.layout.block_bytes // len(shards)) for _ in shards]
    for shard in shards:
        memory.read([BlockId(block)], memoryview(data[shard]), shard)
    return [bytes(each) for each in data]


def blocks_of(*ids: int) -> list[BlockId]:
    return [BlockId(id) for id in ids]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_content_can_be_loaded_into_any_block(kind: str, shards: int) -> None:
    memory, host = memories(kind, shards)
    data = {block: write_random(memory, block) for block in (2, 5, 7)}
    host.save(blocks_of(7, 2, 5), [0, 2, 1])
    host.settle()
    for block in (2, 5, 7):
        write_random(memory, block)
    host.load([2, 0], blocks_of(8, 2))
    host.settle()
    assert content(memory, 8) == data[2]
    assert content(memory, 2) == data[7]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_do_not_change_neighbouring_blocks(kind: str) -> None:
    memory, host = memories(kind)
    around = {block: write_random(memory, block) for block in (3, 5)}
    write_random(memory, 4)
    host.save(blocks_of(4), [1])
    host.load([1], blocks_of(4))
    host.settle()
    assert {block: content(memory, block) for block in (3, 5)} == around


@pytest.mark.parametrize("kind", KINDS)
def test_queued_copies_run_in_the_order_in_which_they_were_queued(kind: str) -> None:
    """One queue reads a slot, overwrites it and reads it again, and loads one hash into a block
    whose old content it has saved."""
    memory, host = memories(kind)
    tier, names = HostTier(host), [BlockHash(bytes([n]) * 16) for n in range(5)]
    data = {block: write_random(memory, block) for block in (1, 2, 3, 4)}
    for number, block in enumerate(blocks_of(1, 2, 3)):
        tier.keep(names[number], block, ends_chunk=False)
    assert tier.bring(names[:1], blocks_of(5)) == [False]
    assert tier.keep(names[3], BlockId(4), ends_chunk=False) == [(names[0], False)]
    assert tier.bring(names[3:4], blocks_of(1)) == [False]  # from the slot that names[0] had
    assert tier.bring(names[1:2], blocks_of(2)) == [False]
    tier.settle()
    assert content(memory, 5) == data[1]
    assert content(memory, 1) == data[4]
    assert content(memory, 2) == data[2]
    tier.move()  # the queue is empty
    assert content(memory, 1) == data[4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_the_host_memory_of_a_gpu_pool_is_pinned() -> None:
    _, host = memories("cuda")
    assert isinstance(host, PinnedBlocks)
    assert host._slots_NZ.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_on_a_gpu_the_step_after_a_save_does_not_change_what_is_saved() -> None:
    memory, host = memories("cuda")
    assert isinstance(memory, TorchMemory)
    for value in range(1, 50):
        kv_of(memory)[4] = value
        torch.cuda.synchronize()
        host.save(blocks_of(4), [1])
        kv_of(memory)[4] = -value  # on the stream of the steps
        host.load([1], blocks_of(6))
        assert bool((kv_of(memory)[6] == value).all())


def test_more_host_memory_than_the_machine_has_raises() -> None:
    memory, _ = memories("cpu")
    with pytest.raises(SettingsError, match=r"no host memory for \d+ KV blocks.*--host-kv-me"):
        CopiedBlocks(memory, 1 << 50)


def test_fault_reports_a_lost_slot() -> None:
    tier = HostTier(memories("sim")[1])
    tier.keep(BlockHash(b"a" * 16), BlockId(1), ends_chunk=False)
    assert tier.fault() == ""
    tier._kept.clear()
    assert tier.fault() == "1 stored - 0 evicted != 0 kept"
