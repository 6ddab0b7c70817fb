"""Decode rows that share their first blocks: attention reads the blocks once, and each row gets the
same output as alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton_engine.attention.cascade import PrefixedRows, shared_prefixes
from baton_engine.attention.interface import table_rows
from baton_engine.attention.kv_views import TUNED, Tuning
from baton_engine.attention.torch_backend import TorchAttention, TorchStep
from baton_engine.attention.torch_decode import SampledRows
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId
from tests.support.engines.attention_specs import batch_of, specs_of
from tests.support.engines.demands import kv_layout
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.small_pool import BLOCK, DIM, LAYERS, POOL, expected_of, memory_of
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

# (tokens that all rows of the group share: whole blocks or 0, own tokens of each row)
Group = tuple[int, Sequence[int]]
# Shares any common prefix, however short.
SHARE_ALWAYS = Tuning(rows_paid=1, keys_paid_each=0, keys_paid=0)


def sharing_attention(
    memory: TorchMemory, heads: int, windows: Sequence[int | None] = ()
) -> TorchAttention:
    return TorchAttention(memory, specs_of(memory.layout, heads, windows), SHARE_ALWAYS)


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """One-token rows of all groups, interleaved."""
    free = [BlockId(1 + 7 * index % POOL) for index in range(POOL)]
    lines = []
    for shared, own_counts in groups:
        prefix = [free.pop() for _ in range(shared // BLOCK)]
        for own in own_counts:
            blocks = [free.pop() for _ in range(-(-own // BLOCK))]
            lines.append(Row([0], shared + own - 1, prefix + blocks))
    return [line for turn in range(3) for line in lines[turn::3]]


def attend(
    step: TorchStep, memory: TorchMemory, rows: Sequence[Row], layer: int, heads: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's outputs for random queries, keys and values, and the expected outputs."""
    noise = torch.Generator().manual_seed(layer)
    q_TNH, k_TKH, v_TKH = (
        torch.randn(len(rows), count, DIM, generator=noise).to(memory.pool.dtype)
        for count in (heads[0], heads[1], heads[1])
    )
    actual_TNH = step.attend(layer, q_TNH, k_TKH, v_TKH)
    expected = [
        expected_of(memory, layer, row, q_TNH[index : index + 1], None)
        for index, row in enumerate(rows)
    ]
    return actual_TNH.double(), torch.cat(expected)


def sizes(step: TorchStep) -> list[int]:
    """The number of rows in each group with a shared prefix, in the first layer."""
    groups = [group for group in step._divisions[0].groups if isinstance(group, PrefixedRows)]
    places = [group.places for group in groups]
    return [len(torch.arange(1000)[each]) for each in places]


GROUPS: dict[str, tuple[list[Group], list[int]]] = {
    "two rows": ([(8, (3, 1))], [2]),
    "one shared block": ([(4, (1, 2, 5))], [3]),
    "many shared blocks": ([(400, (9, 30, 2, 17))], [4]),
    "nothing shared": ([(0, (5, 9, 30))], []),
    "less than a block shared": ([(3, (5, 9))], []),
    "several groups and others": (
        [(40, (3, 8)), (0, (50, 1)), (12, (7, 1, 60)), (8, (2,))],
        [2, 3],
    ),
    "own parts of different lengths": ([(16, (300, 90, 4, 1))], [4]),
    "own parts of exactly one block": ([(16, (4, 4, 4))], [3]),
    "sixteen rows": ([(20, tuple(range(1, 17)))], [16]),
}


@pytest.mark.pairwise
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("name", GROUPS)
def test_rows_that_share_blocks_equal_the_definition(
    name: str, heads: tuple[int, int], dtype: str, near: float
) -> None:
    groups, expected_sizes = GROUPS[name]
    memory, rows = memory_of(heads[1], dtype), rows_of(groups)
    step = sharing_attention(memory, heads[0]).begin(batch_of(rows, memory.layout))
    assert sorted(sizes(step)) == expected_sizes
    for layer in range(LAYERS):
        actual, expected = attend(step, memory, rows, layer, heads)
        torch.testing.assert_close(actual, expected, rtol=10 * near, atol=near)


def test_a_prefix_read_in_several_pieces_equals_the_definition() -> None:
    """The 25 blocks are read two at a time. The scores differ so much that one key dominates."""
    tuning = replace(SHARE_ALWAYS, max_scores=3 * 4 * BLOCK * 2)
    memory, rows = memory_of(2), rows_of([(100, (3, 50, 1))])
    memory.pool[:, :, 0] *= 30
    step = TorchAttention(memory, specs_of(memory.layout, 4), tuning).begin(
        batch_of(rows, memory.layout)
    )
    [group] = step._divisions[0].groups
    assert isinstance(group, PrefixedRows)
    assert len(group._sources) == 13
    actual, expected = attend(step, memory, rows, 0, (4, 2))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_with_shared_prefixes_reads_only_the_rows_own_positions(dtype: str) -> None:
    memory, rows = memory_of(2, dtype), rows_of(GROUPS["several groups and others"][0])
    seen = torch.zeros(POOL + 1, BLOCK, dtype=torch.bool)
    for row in rows:
        for position in range(row.start + 1):
            seen[row.blocks[position // BLOCK], position % BLOCK] = True
    memory.pool.masked_fill_(~seen[:, None, None, None, :, None], torch.nan)
    step = sharing_attention(memory, 4).begin(batch_of(rows, memory.layout))
    for layer in range(LAYERS):
        actual, _ = attend(step, memory, rows, layer, (4, 2))
        assert actual.isfinite().all()


def test_a_row_with_a_shared_prefix_gets_the_same_output_as_alone() -> None:
    memory, rows = memory_of(2), rows_of(GROUPS["several groups and others"][0])
    together, _ = attend(
        sharing_attention(memory, 4).begin(batch_of(rows, memory.layout)), memory, rows, 0, (4, 2)
    )
    noise = torch.Generator().manual_seed(0)
    q_TNH, k_TKH, v_TKH = (torch.randn(len(rows), n, DIM, generator=noise) for n in (4, 2, 2))
    for index, row in enumerate(rows):
        part = slice(index, index + 1)
        step = sharing_attention(memory, 4).begin(batch_of([row], memory.layout))
        alone = step.attend(0, q_TNH[part], k_TKH[part], v_TKH[part])
        torch.testing.assert_close(together[part], alone.double(), rtol=1e-5, atol=1e-6)


def test_layers_with_a_sliding_window_do_not_share_prefixes() -> None:
    rows = rows_of(GROUPS["many shared blocks"][0])
    memory = memory_of(2)
    attention = sharing_attention(memory, 4, (None, 16))
    plain, windowed = attention.begin(batch_of(rows, memory.layout))._divisions
    assert [type(group) for group in plain.groups] == [PrefixedRows]
    assert {type(group) for group in windowed.groups} == {SampledRows}


def prefixes_of(
    tables: Sequence[Sequence[int]], block_size: int = 1, tuning: Tuning = SHARE_ALWAYS
) -> list[tuple[list[int], int]]:
    rows = [
        Row([0], (len(table) - 1) * block_size, [BlockId(block) for block in table])
        for table in tables
    ]
    if not rows:
        return []
    table = table_rows(batch_of(rows, kv_layout(block=block_size)), 0)
    return [(each.rows, each.num_blocks) for each in shared_prefixes(table, block_size, tuning)]


def test_rows_are_grouped_by_the_prefixes_that_save_most() -> None:
    """The arguments are block tables, and the result is (rows, shared blocks) of each group. The
    last block of a table holds the row's own token, and is never shared."""
    assert prefixes_of([[1, 2, 3], [1, 2, 4], [1, 2, 5]]) == [([0, 1, 2], 2)]
    assert prefixes_of(
        [[1, 2, 3, 4, 90], [1, 5, 6, 7, 91], [1, 2, 3, 4, 92], [1, 5, 6, 7, 93]]
    ) == [
        ([0, 2], 4),
        ([1, 3], 4),
    ]
    assert prefixes_of([[1, 2, 3, 90], [1, 2, 3, 91], [1, 2, 92], [1, 2, 93]]) == [
        ([0, 1, 2, 3], 2)
    ]
    assert prefixes_of([[1, 90], [2, 91], [1, 92], [1], [90]]) == [([0, 2], 1)]
    assert prefixes_of([[7, 7], [7, 8]]) == [([0, 1], 1)]


def test_prefixes_that_save_too_little_are_not_shared() -> None:
    def rows_with(rows: int, keys: int) -> list[list[int]]:
        return [[*range(1, keys // 16 + 1), 900 + row] for row in range(rows)]

    assert prefixes_of(rows_with(2, 4096), 16, TUNED) == []
    assert prefixes_of(rows_with(16, 128), 16, TUNED) == []
    assert prefixes_of(rows_with(16, 144), 16, TUNED) == [(list(range(16)), 9)]
    assert prefixes_of(rows_with(3, 976), 16, TUNED) == [([0, 1, 2], 61)]


@pytest.mark.parametrize("name", ["llama-gqa2-tied", "qwen3-gqa4"])
def test_ids_after_a_shared_prompt_equal_those_of_transformers(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tally, group_sizes = tiny_model(name), Tally(), []
    attend = PrefixedRows.attend

    def recording_attend(group: PrefixedRows, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        group_sizes.append(len(q_RNH))
        return attend(group, layer, q_RNH)

    monkeypatch.setattr(PrefixedRows, "attend", recording_attend)
    engine = small_engine(folder)
    # 528 shared tokens are enough for 4 rows to share them.
    prompts = [prompt_of(528, seed=1) + prompt_of(own, seed=own) for own in (1, 7, 16, 30, 33)]
    [first] = generate_ids(engine, prompts[:1])
    assert not group_sizes
    others = generate_ids(engine, prompts[1:])
    assert max(group_sizes) == len(prompts) - 1
    for prompt, ids in zip(prompts, [first, *others], strict=True):
        compare(reference(folder, prompt, 64), ids, tally)
    tally.check()
