"""TorchAttention against attention computed token by token in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from baton_engine.attention.kv_views import Tuning
from baton_engine.attention.torch_backend import MAX_GROUP_BLOCKS, SMALL_ROW_BLOCKS, TorchAttention
from baton_engine.interface import Row
from baton_protocol.ids import BlockId
from tests.support.engines.attention_specs import batch_of, specs_of
from tests.support.engines.small_pool import BLOCK, DIM, LAYERS, POOL, expected_of, memory_of


def rows_of(spans: Sequence[tuple[int, int]], seed: int = 0) -> list[Row]:
    """Rows from spans (start, tokens), each with its own blocks, scattered over the pool."""
    free = list(range(1, POOL + 1))
    random.Random(seed).shuffle(free)
    rows = []
    for start, tokens in spans:
        count = -(-(start + tokens) // BLOCK)
        rows.append(Row([0] * tokens, start, [BlockId(free.pop()) for _ in range(count)]))
    return rows


SPANS = {
    "one token": [(0, 1)],
    "decode rows of one length": [(11, 1)] * 3,
    "decode rows of many lengths": [(200, 1), (90, 1), (70, 1), (13, 1), (4, 1), (0, 1)],
    "a prompt": [(0, 13)],
    "chunked prefill": [(3, 7), (16, 5), (40, 4)],
    "mixed": [(33, 1), (5, 1), (0, 9), (8, 7), (7, 2)],
}


# The sliding window of each layer: none at all, all layers, one layer, and two sizes. With a window
# of 1 a token sees only itself.
WINDOWS: list[tuple[int | None, ...]] = [(), (6, 6), (None, 16), (1, 40)]


# On a CPU, attention reads float32 keys in place and bfloat16 keys from copies, here of a few
# blocks at a time. On other devices it copies all keys (in_place=False).
@pytest.mark.pairwise
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("name", SPANS)
def test_attention_equals_the_definition(
    name: str,
    heads: tuple[int, int],
    windows: tuple[int | None, ...],
    dtype: str,
    near: float,
    in_place: bool,
) -> None:
    num_heads, kv_heads = heads
    tuning = Tuning(in_place=in_place, max_copied=7 * kv_heads * BLOCK * DIM)
    memory, rows = memory_of(kv_heads, dtype), rows_of(SPANS[name])
    before = memory.pool.clone()
    tokens = sum(len(row.tokens) for row in rows)
    noise = torch.Generator().manual_seed(2)
    step = TorchAttention(memory, specs_of(memory.layout, num_heads, windows), tuning).begin(
        batch_of(rows, memory.layout)
    )
    for layer in range(LAYERS):
        q, k, v = (
            torch.randn(tokens, count, DIM, generator=noise).to(memory.pool.dtype)
            for count in (num_heads, kv_heads, kv_heads)
        )
        out_TNH = step.attend(layer, q, k, v)
        begin = 0
        for row in rows:
            end = begin + len(row.tokens)
            window = windows[layer] if windows else None
            expected = expected_of(memory, layer, row, q[begin:end], window)
            actual = out_TNH[begin:end].double()
            torch.testing.assert_close(actual, expected, rtol=near, atol=near)
            for index, position in enumerate(range(row.start, row.start + len(row.tokens))):
                block, slot = row.blocks[position // BLOCK], position % BLOCK
                assert torch.equal(memory.pool[block, layer, 0, :, slot], k[begin + index])
                assert torch.equal(memory.pool[block, layer, 1, :, slot], v[begin + index])
                before[block, :, :, :, slot] = memory.pool[block, :, :, :, slot]
            begin = end
    assert torch.equal(memory.pool, before)  # no other slot was written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_row_reads_only_the_keys_that_it_attends_to(dtype: str) -> None:
    """Other slots may hold anything from earlier requests; this test fills them with NaN."""
    memory, rows = memory_of(2, dtype), rows_of(SPANS["decode rows of many lengths"])
    for layer, window in enumerate(windows := (None, 16)):
        seen = torch.zeros(POOL + 1, BLOCK, dtype=torch.bool)
        for row in rows:
            first = max(0, row.start + 1 - window) if window else 0
            for position in range(first, row.start + 1):
                seen[row.blocks[position // BLOCK], position % BLOCK] = True
        memory.pool[:, layer].masked_fill_(~seen[:, None, None, :, None], torch.nan)
    step = TorchAttention(memory, specs_of(memory.layout, 4, windows)).begin(
        batch_of(rows, memory.layout)
    )
    noise = torch.Generator().manual_seed(3)
    for layer in range(LAYERS):
        q, k, v = (
            torch.randn(len(rows), count, DIM, generator=noise).to(memory.pool.dtype)
            for count in (4, 2, 2)
        )
        assert step.attend(layer, q, k, v).isfinite().all()


def groups_of(lengths: Sequence[int]) -> list[int]:
    """Sizes of the groups for decode rows with these numbers of blocks."""
    rows = [
        Row([0], blocks * BLOCK - 1, [BlockId(1 + index)] * blocks)
        for index, blocks in enumerate(lengths)
    ]
    memory = memory_of(1)
    step = TorchAttention(memory, specs_of(memory.layout, 1)).begin(batch_of(rows, memory.layout))
    places = [group.places for group in step._divisions[0].groups]
    return [each.stop - each.start for each in places if isinstance(each, slice)]


def test_rows_of_very_different_lengths_are_in_different_groups() -> None:
    assert groups_of([100, 60, 50, 49, 20, 3, 2, 1]) == [3, 1, 1, 3]
    assert groups_of([SMALL_ROW_BLOCKS, 1, 1]) == [3]


def test_a_group_gathers_a_bounded_number_of_blocks() -> None:
    long = MAX_GROUP_BLOCKS // 4
    assert groups_of([long] * 10) == [4, 4, 2]
    assert groups_of([2 * MAX_GROUP_BLOCKS]) == [1]
