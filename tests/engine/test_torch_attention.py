"""The torch twin against attention written down token by token in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from baton_engine.api import Row
from baton_engine.attention import MAX_GROUP_BLOCKS, SMALL_ROW_BLOCKS, TorchAttention, TorchStep
from baton_engine.torch_memory import TorchMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

LAYERS, BLOCK, DIM, POOL = 2, 4, 8, 400


def memory_of(kv_heads: int) -> TorchMemory:
    layout = KVLayout(
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        block_size=BLOCK,
        dtype="float32",
        chunk_blocks=1,
    )
    memory = TorchMemory(layout, POOL, torch.device("cpu"))
    memory.pool.normal_(generator=torch.Generator().manual_seed(1))
    return memory


def rows_of(spans: Sequence[tuple[int, int]], seed: int = 0) -> list[Row]:
    """Rows (start, tokens) with blocks of their own, scattered over the pool."""
    free = list(range(1, POOL + 1))
    random.Random(seed).shuffle(free)
    rows = []
    for start, tokens in spans:
        count = -(-(start + tokens) // BLOCK)
        rows.append(Row([0] * tokens, start, [BlockId(free.pop()) for _ in range(count)]))
    return rows


def expected_of(
    memory: TorchMemory, layer: int, row: Row, q_TNH: torch.Tensor, group: int
) -> torch.Tensor:
    """softmax(q k / sqrt(H)) v over the row's past, one query and one head at a time."""
    table = memory.pool[list(row.blocks), layer].double()  # [M, 2, K, B, H]
    k_SKH, v_SKH = table.permute(1, 0, 3, 2, 4).reshape(2, -1, *table.shape[2:3], DIM)
    out_TNH = torch.empty(q_TNH.shape, dtype=torch.float64)
    for index in range(q_TNH.shape[0]):
        end = row.start + index + 1
        for head in range(q_TNH.shape[1]):
            scores_S = k_SKH[:end, head // group] @ q_TNH[index, head].double() / DIM**0.5
            out_TNH[index, head] = scores_S.softmax(0) @ v_SKH[:end, head // group]
    return out_TNH


SPANS = {
    "one token alone": [(0, 1)],
    "decode rows of one length": [(11, 1)] * 3,
    "decode rows of many lengths": [(200, 1), (90, 1), (70, 1), (13, 1), (4, 1), (0, 1)],
    "a prompt": [(0, 13)],
    "pieces with a past": [(3, 7), (16, 5), (40, 4)],
    "mixed": [(33, 1), (5, 1), (0, 9), (8, 7), (7, 2)],
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("name", SPANS)
def test_attention_equals_the_definition(name: str, heads: tuple[int, int]) -> None:
    num_heads, kv_heads = heads
    memory, rows = memory_of(kv_heads), rows_of(SPANS[name])
    before = memory.pool.clone()
    tokens = sum(len(row.tokens) for row in rows)
    noise = torch.Generator().manual_seed(2)
    step = TorchAttention(memory, num_heads).begin(rows)
    for layer in range(LAYERS):
        q, k, v = (
            torch.randn(tokens, count, DIM, generator=noise)
            for count in (num_heads, kv_heads, kv_heads)
        )
        out_TNH = step.attend(layer, q, k, v)
        begin = 0
        for row in rows:
            end = begin + len(row.tokens)
            expected = expected_of(memory, layer, row, q[begin:end], num_heads // kv_heads)
            torch.testing.assert_close(out_TNH[begin:end].double(), expected, rtol=1e-4, atol=1e-5)
            for index, position in enumerate(range(row.start, row.start + len(row.tokens))):
                block, slot = row.blocks[position // BLOCK], position % BLOCK
                assert torch.equal(memory.pool[block, layer, 0, :, slot], k[begin + index])
                assert torch.equal(memory.pool[block, layer, 1, :, slot], v[begin + index])
                before[block, :, :, :, slot] = memory.pool[block, :, :, :, slot]
            begin = end
    assert torch.equal(memory.pool, before)  # no other slot was touched


def groups_of(lengths: Sequence[int]) -> list[int]:
    """Sizes of the groups that decode rows with so many blocks fall into."""
    rows = [Row([0], blocks * BLOCK - 1, [BlockId(1)] * blocks) for blocks in lengths]
    step = TorchStep(memory_of(1), 1, rows)
    return [group.end - group.begin for group in step._groups]


def test_rows_of_unlike_length_are_not_padded_to_each_other() -> None:
    assert groups_of([100, 60, 50, 49, 20, 3, 2, 1]) == [3, 1, 1, 3]
    assert groups_of([SMALL_ROW_BLOCKS, 1, 1]) == [3]


def test_a_group_gathers_a_bounded_number_of_blocks() -> None:
    long = MAX_GROUP_BLOCKS // 4
    assert groups_of([long] * 10) == [4, 4, 2]
    assert groups_of([2 * MAX_GROUP_BLOCKS]) == [1]
