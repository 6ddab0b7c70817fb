"""Large weights are in memory for which huge pages are asked for; memory beside them is not."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.huge_pages import PAGE_BYTES, ask_for_huge_pages, move_to_huge_pages

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or sys.platform != "linux",
    reason="this kernel has no transparent huge pages",
)
ROWS = 2 * PAGE_BYTES  # of a byte each; one whole page is always among them


def mapping_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that has an address."""
    found: dict[str, str] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            if found is not None:
                break
            begin, end = (int(each, 16) for each in first.split("-"))
            found = {} if begin <= address < end else None
        elif found is not None:
            found[first[:-1]] = rest
    assert found, f"no mapping has the address {address:x}"
    return found


def asked_for(address: int) -> bool:
    """Whether the kernel was asked for huge pages at an address ("hg" in its flags)."""
    return "hg" in mapping_of(address)["VmFlags"].split()


def whole_page(tensor: torch.Tensor) -> int:
    """The address of the first whole page of a tensor."""
    return -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES


def new_memory(pages: int) -> torch.Tensor:
    """Memory for which nobody has asked for huge pages before."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, pages * PAGE_BYTES, flags), dtype=torch.uint8)


def test_only_whole_pages_are_asked_for() -> None:
    memory = new_memory(4)
    begin = whole_page(memory)
    assert ask_for_huge_pages(begin + 1, 2 * PAGE_BYTES)
    assert [asked_for(begin + page * PAGE_BYTES) for page in range(3)] == [False, True, False]
    assert not ask_for_huge_pages(begin + 1, PAGE_BYTES)


def test_a_layers_weights_ask_for_huge_pages() -> None:
    slots = WeightSlots(torch.uint8, torch.device("cpu"))
    for weight in (
        slots.tensor("one", ROWS, 1),
        slots.stacked(["two", "three"], [ROWS, ROWS], 1),
        slots.empty(ROWS),
    ):
        assert asked_for(whole_page(weight))


def test_written_memory_is_moved_with_its_bytes() -> None:
    memory = new_memory(5)
    memory.copy_(torch.randint(0, 255, memory.shape, dtype=torch.uint8))
    before = memory.clone()
    moved = move_to_huge_pages(whole_page(memory) + 1, 2 * PAGE_BYTES)
    assert torch.equal(memory, before)
    huge = int(mapping_of(memory.data_ptr())["AnonHugePages"].split()[0]) * 1024
    assert huge >= 3 * PAGE_BYTES or not moved
