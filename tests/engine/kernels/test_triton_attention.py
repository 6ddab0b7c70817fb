"""TritonAttention does what its torch twin does, given the same rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.attention.torch_backend import TorchAttention
from baton_engine.attention.triton_backend import TritonAttention
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId
from tests.support.engines.demands import kv_layout
from tests.support.engines.kernels import DEVICE, noise
from tests.support.engines.paged import assert_near

BLOCK, DIM, HEADS, KV_HEADS, POOL = 4, 16, 4, 2, 100
WINDOWS = (None, 6)  # of two layers
SPANS = {
    "one-token rows": [(60, 1), (13, 1), (4, 1), (0, 1)],
    "a prompt": [(0, 13)],
    "a mix": [(33, 1), (5, 1), (0, 9), (8, 7), (7, 2)],
}


def memory() -> TorchMemory:
    layout = kv_layout(layers=len(WINDOWS), heads=KV_HEADS, dim=DIM, block=BLOCK)
    made = TorchMemory(layout, POOL, DEVICE)
    made.pool.copy_(noise(*made.pool.shape))
    return made


def rows_of(spans: Sequence[tuple[int, int]]) -> list[Row]:
    """Rows (start, tokens) with blocks of their own, and one more than they need."""
    free = list(range(1, POOL + 1))
    random.Random(0).shuffle(free)
    return [
        Row(
            [0] * tokens, start, [BlockId(free.pop()) for _ in range((start + tokens) // BLOCK + 2)]
        )
        for start, tokens in spans
    ]


@pytest.mark.parametrize("name", SPANS)
def test_outputs_and_the_pool_are_those_of_the_twin(name: str) -> None:
    rows, tokens = rows_of(SPANS[name]), sum(count for _, count in SPANS[name])
    both = memory(), memory()
    twin: StepAttention = TorchAttention(both[0], HEADS, WINDOWS).begin(rows)
    step: StepAttention = TritonAttention(both[1], HEADS, WINDOWS).begin(rows)
    for layer in range(len(WINDOWS)):
        qkv = noise(tokens, HEADS + 2 * KV_HEADS, DIM, seed=layer)
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        assert_near(step.attend(layer, q, k, v), twin.attend(layer, q, k, v).cpu().double())
    assert torch.equal(both[0].pool, both[1].pool)


@pytest.mark.parametrize("name", SPANS)
def test_slots_are_those_of_the_twin(name: str) -> None:
    rows, held = rows_of(SPANS[name]), memory()
    twin = TorchAttention(held, HEADS).begin(rows).slots()
    slots = TritonAttention(held, HEADS).begin(rows).slots()
    assert torch.equal(slots.slots_T, twin.slots_T)
    assert slots.pool is twin.pool is held.pool


def test_what_a_kernel_stored_is_not_stored_again() -> None:
    rows, held = rows_of(SPANS["a mix"]), memory()
    before = held.pool.clone()
    step = TritonAttention(held, HEADS).begin(rows)
    qkv = noise(20, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    step.attend(0, q, k, v, stored=True)
    assert torch.equal(held.pool, before)


@pytest.mark.parametrize("starts", [[290], [30, 7, 0]], ids=["keys divided", "several rows"])
def test_a_step_over_inputs_that_keep_their_place_does_what_a_begun_one_does(
    starts: list[int],
) -> None:
    """With a line of padding behind the rows, which reads block 0 and stores nothing."""
    rows = rows_of([(start, 1) for start in starts])
    lines = len(rows) if len(rows) == 1 else len(rows) + 1
    both = memory(), memory()
    begun = TritonAttention(both[0], HEADS, WINDOWS).begin(rows)
    slots = torch.full((lines,), -1, dtype=torch.int64, device=DEVICE)
    lengths = torch.ones(lines, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(lines, POOL, dtype=torch.int32, device=DEVICE)
    slots[: len(rows)] = begun.slots().slots_T
    for line, row in enumerate(rows):
        lengths[line] = row.start + 1
        table[line, : len(row.blocks)] = torch.tensor(row.blocks)
    kept = TritonAttention(both[1], HEADS, WINDOWS).over(slots, lengths, table)
    for layer in range(len(WINDOWS)):
        qkv = noise(lines, HEADS + 2 * KV_HEADS, DIM, seed=layer)
        q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        real = slice(len(rows))
        expected = begun.attend(layer, q[real], k[real], v[real])
        found = kept.attend(layer, q, k, v)
        assert_near(found[real], expected.cpu().double())
        assert bool(found.isfinite().all())
    assert torch.equal(both[0].pool, both[1].pool)
