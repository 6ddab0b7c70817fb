"""The host tier's memory on CUDA: its size, and the order of copies and steps. CUDA is a fake."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Sequence

import pytest
import torch

from baton_engine.errors import SettingsError
from baton_engine.kv.host_tier import HostTier
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.pinned_blocks import PinnedBlocks, contiguous_runs
from baton_protocol.ids import BlockHash, BlockId
from tests.support.engines.demands import kv_layout
from tests.support.engines.fake_cuda import FakeCuda
from tests.support.engines.small_pool import kv_of

SLOTS = 5
# Copies, the event after them, and the steps' wait for it.
ONE_COPY = ["copy 1 on copies", "record on copies", "steps wait"]
Action = Callable[[PinnedBlocks, FakeCuda], None]


def pinned(cuda: FakeCuda, slots: int = SLOTS) -> tuple[TorchMemory, PinnedBlocks]:
    memory = TorchMemory(kv_layout(layers=3, heads=2, dim=8), 8, torch.device("cpu"))
    return memory, PinnedBlocks(memory, slots, cuda.calls)


def save(blocks: PinnedBlocks, cuda: FakeCuda) -> None:
    blocks.save([BlockId(3)], [0])


def load(blocks: PinnedBlocks, cuda: FakeCuda) -> None:
    blocks.load([0], [BlockId(4)])


def step(blocks: PinnedBlocks, cuda: FakeCuda) -> None:
    cuda.start_step()


def settle(blocks: PinnedBlocks, cuda: FakeCuda) -> None:
    blocks.settle()


def test_exactly_the_asked_bytes_are_locked_on_whole_pages() -> None:
    cuda = FakeCuda()
    _, blocks = pinned(cuda)
    [(address, size)] = cuda.locked.items()
    assert size == SLOTS * blocks.slot_bytes
    assert size & (size - 1), "the test needs a size that is no power of two"
    assert address % mmap.PAGESIZE == 0


def test_the_pages_are_unlocked_when_the_memory_is_released_and_its_copies_are_done() -> None:
    cuda = FakeCuda()
    _, blocks = pinned(cuda)
    blocks.save([BlockId(3)], [0])
    del blocks
    gc.collect()
    assert cuda.locked == {}
    assert cuda.log == [*ONE_COPY, "host waits"]


def test_pages_that_cannot_be_locked_are_one_line_with_the_reason() -> None:
    with pytest.raises(
        SettingsError,
        match=r"^no host memory for 5 KV blocks \(\d+ bytes\): cudaHostRegister fails with CUDA "
        r"error 2; lower --host-kv-memory$",
    ):
        pinned(FakeCuda(code=2))


@pytest.mark.parametrize("slots", [1 << 50, 1 << 70])
def test_more_memory_than_can_be_mapped_is_one_line(slots: int) -> None:
    with pytest.raises(SettingsError, match=r"^no host memory for \d+ KV blocks .*--host-kv-me"):
        pinned(FakeCuda(), slots)


@pytest.mark.parametrize(
    ("actions", "log"),
    [
        ([save], ONE_COPY),
        ([load], ONE_COPY),
        ([save, step], [*ONE_COPY, "step"]),
        ([load, step], [*ONE_COPY, "step"]),
        ([save, load, step], [*ONE_COPY, *ONE_COPY, "step"]),
        ([step, step], ["step", "step"]),
        ([settle], []),
        ([step, settle], ["step"]),
        ([save, settle, settle], [*ONE_COPY, "host waits"]),
        # A reservation may share blocks that a launched step loads.
        ([load, step, settle], [*ONE_COPY, "step", "host waits"]),
        ([load, settle, save, settle], [*ONE_COPY, "host waits"] * 2),
    ],
)
def test_steps_wait_for_the_copies_before_them_and_the_host_only_for_copies(
    actions: Sequence[Action], log: list[str]
) -> None:
    cuda = FakeCuda()
    _, blocks = pinned(cuda)
    for action in actions:
        action(blocks, cuda)
    assert cuda.log == log


def test_a_step_overwrites_saved_blocks_and_reads_loaded_ones_with_the_latest_copies() -> None:
    cuda = FakeCuda()
    memory, blocks = pinned(cuda)
    kv_of(memory)[3], kv_of(memory)[4] = 1.0, 2.0
    blocks.save([BlockId(3), BlockId(4)], [1, 0])
    blocks.load([0], [BlockId(3)])
    assert bool((kv_of(memory)[3] == 1).all()), "the copy has not been made yet"
    cuda.start_step()
    assert bool((kv_of(memory)[3] == 2).all())
    kv_of(memory)[3], kv_of(memory)[4] = 8.0, 9.0
    blocks.load([1], [BlockId(4)])
    blocks.settle()
    assert bool((kv_of(memory)[4] == 1).all())


@pytest.mark.parametrize(
    ("targets", "sources", "runs"),
    [
        ([], [], []),
        ([7], [2], [(7, 2, 1)]),
        ([1, 2, 3], [4, 5, 6], [(1, 4, 3)]),
        ([1, 2, 3], [6, 5, 4], [(1, 6, 1), (2, 5, 1), (3, 4, 1)]),
        ([1, 2, 4, 5], [1, 2, 3, 4], [(1, 1, 2), (4, 3, 2)]),
        ([1, 2, 2], [3, 4, 5], [(1, 3, 2), (2, 5, 1)]),
    ],
)
def test_pairs_that_both_ascend_by_one_are_one_copy(
    targets: list[int], sources: list[int], runs: list[tuple[int, int, int]]
) -> None:
    assert list(contiguous_runs(targets, sources)) == runs


def test_the_tier_waits_for_copies_and_not_for_steps() -> None:
    cuda = FakeCuda()
    tier = HostTier(pinned(cuda)[1])
    tier.settle()
    cuda.start_step()
    tier.settle()
    assert cuda.log == ["step"]
    tier.keep(BlockHash(b"a" * 16), BlockId(1), ends_chunk=False)
    tier.settle()
    tier.settle()
    assert cuda.log == ["step", *ONE_COPY, "host waits"]
