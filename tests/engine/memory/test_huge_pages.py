"""Large weights are in memory for which huge pages are asked for; memory beside them is not."""

from __future__ import annotations

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


def asked_for(address: int) -> bool:
    """Whether the kernel was asked for huge pages at an address ("hg" in its flags)."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(each, 16) for each in words[0].split("-"))
            found = begin <= address < end
        elif found and words[0] == "VmFlags:":
            return "hg" in words
    raise AssertionError(f"no mapping has the address {address:x}")


def whole_page(tensor: torch.Tensor) -> int:
    """The address of the first whole page of a tensor."""
    return -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES


def test_only_whole_pages_are_asked_for() -> None:
    memory = torch.empty(4 * PAGE_BYTES, dtype=torch.uint8)
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
    tensor = torch.randint(0, 255, (4 * PAGE_BYTES,), dtype=torch.uint8)
    before = tensor.clone()
    moved = move_to_huge_pages(whole_page(tensor) + 1, 2 * PAGE_BYTES)
    assert torch.equal(tensor, before)
    assert moved == (huge_bytes(tensor.data_ptr()) >= 3 * PAGE_BYTES)


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that has an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(each, 16) for each in words[0].split("-"))
            found = begin <= address < end
        elif found and words[0] == "AnonHugePages:":
            return int(words[1]) * 1024
    raise AssertionError(f"no mapping has the address {address:x}")
