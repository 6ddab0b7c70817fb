"""Copies between blocks and slots of host memory: bytes, order, both kinds of memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from baton_engine.errors import SettingsError
from baton_engine.interface import KVMemory
from baton_engine.kv.cpu_offload import CopiedBlocks, HostMemory, HostTier
from baton_engine.kv.kv_pool import PinnedBlocks, TorchMemory
from baton_engine.sim.runner import SimMemory
from baton_protocol.ids import BlockHash, BlockId
from tests.support.engines.demands import kv_layout

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")]
KINDS = ["sim", "cpu", "bfloat16", "pinned", pytest.param("cuda", marks=GPU)]
SLOTS = 3


def room(kind: str, shards: int = 1) -> tuple[KVMemory, HostMemory]:
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
    if kind in ("pinned", "cuda"):
        return pool, PinnedBlocks(pool, SLOTS)
    return pool, CopiedBlocks(pool, SLOTS)


def written(memory: KVMemory, block: int) -> list[bytes]:
    """Random bytes, now in the block; by shard."""
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
def test_what_was_saved_comes_back_into_any_blocks(kind: str, shards: int) -> None:
    memory, host = room(kind, shards)
    data = {block: written(memory, block) for block in (2, 5, 7)}
    host.save(blocks_of(7, 2, 5), [0, 2, 1])
    for block in (2, 5, 7):
        written(memory, block)
    host.load([2, 0], blocks_of(8, 2))
    host.settle()
    assert content(memory, 8) == data[2]
    assert content(memory, 2) == data[7]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_s_neighbours_are_left_alone(kind: str) -> None:
    memory, host = room(kind)
    around = {block: written(memory, block) for block in (3, 5)}
    written(memory, 4)
    host.save(blocks_of(4), [1])
    host.load([1], blocks_of(4))
    host.settle()
    assert {block: content(memory, block) for block in (3, 5)} == around


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_made_in_the_order_in_which_they_were_decided(kind: str) -> None:
    """A slot is read, used anew and read again, and the same block is sent out twice, in one go."""
    memory, host = room(kind)
    tier, names = HostTier(host), [BlockHash(bytes([n]) * 16) for n in range(5)]
    data = {block: written(memory, block) for block in (1, 2, 3, 4)}
    for number, block in enumerate(blocks_of(1, 2, 3)):
        tier.keep(names[number], block, ends_chunk=False)
    assert tier.bring(names[:1], blocks_of(5)) == [False]
    assert tier.keep(names[3], BlockId(4), ends_chunk=False) == [(names[0], False)]
    assert tier.bring(names[3:4], blocks_of(1)) == [False]  # from the slot of the first
    assert tier.bring(names[1:2], blocks_of(2)) == [False]
    tier.settle()
    assert content(memory, 5) == data[1]
    assert content(memory, 1) == data[4]
    assert content(memory, 2) == data[2]
    tier.move()  # nothing is due twice
    assert content(memory, 1) == data[4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_for_a_pool_on_a_gpu_the_room_is_pinned() -> None:
    _, host = room("cuda")
    assert isinstance(host, PinnedBlocks)
    assert host._slots_NZ.is_pinned()


def test_room_that_the_machine_does_not_have_is_refused() -> None:
    memory: Any = room("cpu")[0]
    for kind in (CopiedBlocks, PinnedBlocks):
        with pytest.raises(SettingsError, match=r"no host memory for \d+ KV blocks.*--host-kv-me"):
            kind(memory, 1 << 50)


def test_the_books_tell_when_a_slot_is_lost() -> None:
    tier = HostTier(room("sim")[1])
    tier.keep(BlockHash(b"a" * 16), BlockId(1), ends_chunk=False)
    assert tier.fault() == ""
    tier._kept.clear()
    assert tier.fault() == "1 stored - 0 evicted != 0 kept"
