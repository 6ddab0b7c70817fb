"""Decode rows that share their first splits, with batch-invariant attention: each row gets the bits
that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton_engine.attention.exact import decode_rows
from baton_engine.attention.exact.backend import TorchAttention, TorchStep
from baton_engine.attention.exact.paged_rows import PagedRows
from baton_engine.attention.exact.pages import SIZES, Sizes
from baton_engine.attention.exact.row_groups import (
    PrefixGroup,
    group_by_length,
    group_by_prefix,
    group_by_size,
)
from baton_engine.attention.exact.splits import Splits
from baton_engine.attention.interface import TableRow, table_rows
from baton_engine.config.model_config import AttentionSpec
from baton_engine.config.step_sizes import SPLIT_KEYS
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId
from tests.support.engines.attention_specs import batch_of, sinks_of, specs_of
from tests.support.engines.demands import kv_layout
from tests.support.engines.exactness import Tally, compare_all
from tests.support.engines.small_pool import BLOCK, DIM, LAYERS, POOL, expected_of, kv_of, memory_of
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

# (tokens that all rows of the group share: whole blocks or 0, own tokens of each row)
Group = tuple[int, Sequence[int]]


@pytest.fixture(params=["in place", "copied"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How one-token rows get K and V: from the blocks of the pool, or from copies."""
    if request.param == "copied":
        monkeypatch.setattr(decode_rows, "can_compute", lambda *shape: False)


def attention_of(
    memory: TorchMemory, heads: int, windows: Sequence[int | None] = (), *, sinks: bool = False
) -> TorchAttention:
    return TorchAttention(memory, specs_of(memory.layout, heads, windows, sinks=sinks))


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
    step: TorchStep,
    memory: TorchMemory,
    rows: Sequence[Row],
    layer: int,
    heads: tuple[int, int],
    sinks_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's outputs for random queries, keys and values, and the expected outputs."""
    noise = torch.Generator().manual_seed(layer)
    q_TNH, k_TKH, v_TKH = (
        torch.randn(len(rows), count, DIM, generator=noise).to(memory.fields["k"].dtype)
        for count in (heads[0], heads[1], heads[1])
    )
    actual_TNH = step.attend(layer, q_TNH, k_TKH, v_TKH, sinks_N=sinks_N)
    expected = [
        expected_of(memory, layer, row, q_TNH[index : index + 1], None, sinks_N)
        for index, row in enumerate(rows)
    ]
    return actual_TNH.double(), torch.cat(expected)


# Groups of rows, and the number of rows in each group that shares whole splits of 64 tokens.
GROUPS: dict[str, tuple[list[Group], list[int]]] = {
    "two rows": ([(64, (3, 1))], [2]),
    "one shared split and some blocks": ([(112, (1, 2, 5))], [3]),
    "many shared splits": ([(400, (9, 30, 2, 17))], [4]),
    "nothing shared": ([(0, (5, 9, 30))], []),
    "less than a split shared": ([(48, (5, 9))], []),
    "several groups and others": (
        [(80, (3, 8)), (0, (50, 1)), (128, (7, 1, 60)), (64, (2,))],
        [2, 3],
    ),
    "own parts of different lengths": ([(64, (300, 90, 4, 1))], [4]),
    "own parts of exactly one split": ([(64, (64, 64, 64))], [3]),
    "drafts of several sequences": (
        [(128, (1, 2, 3, 4)), (192, (17, 18)), (64, (60, 61, 62, 63, 64, 65)), (0, (40, 41))],
        [2, 4, 6],
    ),
    "sixteen rows": ([(80, tuple(range(1, 17)))], [16]),
}


def table_rows_of(rows: Sequence[Row], block_size: int = BLOCK) -> list[TableRow]:
    return table_rows(batch_of(rows, kv_layout(block=block_size)), 0) if rows else []


def sizes(rows: Sequence[Row]) -> list[int]:
    """The number of rows in each group with a shared prefix."""
    groups = group_by_prefix(table_rows_of(rows), Splits(BLOCK, None))
    return sorted(len(members) for members, shared in groups if shared)


@pytest.mark.pairwise
@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("name", GROUPS)
def test_rows_that_share_blocks_equal_the_definition(
    name: str, heads: tuple[int, int], sinks: bool, dtype: str, near: float
) -> None:
    groups, expected_sizes = GROUPS[name]
    memory, rows = memory_of(heads[1], dtype), rows_of(groups)
    assert sizes(rows) == expected_sizes
    step = attention_of(memory, heads[0], sinks=sinks).begin(batch_of(rows, memory.layout))
    sinks_N = sinks_of(heads[0]) if sinks else None
    for layer in range(LAYERS):
        actual, expected = attend(step, memory, rows, layer, heads, sinks_N)
        torch.testing.assert_close(actual, expected, rtol=10 * near, atol=near)


def test_scores_that_differ_by_much_equal_the_definition() -> None:
    """One key dominates, in a shared split or in a row's own."""
    memory, rows = memory_of(2), rows_of([(112, (3, 50, 1))])
    kv_of(memory)[:, :, 0] *= 30
    actual, expected = attend(
        attention_of(memory, 4).begin(batch_of(rows, memory.layout)), memory, rows, 0, (4, 2)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_with_shared_prefixes_reads_only_the_rows_own_positions(dtype: str) -> None:
    memory, rows = memory_of(2, dtype), rows_of(GROUPS["several groups and others"][0])
    seen = torch.zeros(POOL + 1, BLOCK, dtype=torch.bool)
    seen[0] = True  # padding, which is never written
    for row in rows:
        for position in range(row.start + 1):
            seen[row.blocks[position // BLOCK], position % BLOCK] = True
    kv_of(memory).masked_fill_(~seen[:, None, None, None, :, None], torch.nan)
    step = attention_of(memory, 4).begin(batch_of(rows, memory.layout))
    for layer in range(LAYERS):
        actual, _ = attend(step, memory, rows, layer, (4, 2))
        assert actual.isfinite().all()


@pytest.mark.pairwise
@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("name", GROUPS)
def test_a_row_gets_the_same_bits_as_alone(name: str, sinks: bool, dtype: str) -> None:
    memory, rows = memory_of(2, dtype), rows_of(GROUPS[name][0])
    attention, sinks_N = attention_of(memory, 4, sinks=sinks), sinks_of(4) if sinks else None
    step = attention.begin(batch_of(rows, memory.layout))
    together, _ = attend(step, memory, rows, 0, (4, 2), sinks_N)
    noise = torch.Generator().manual_seed(0)
    q_TNH, k_TKH, v_TKH = (
        torch.randn(len(rows), n, DIM, generator=noise).to(memory.fields["k"].dtype)
        for n in (4, 2, 2)
    )
    for index, row in enumerate(rows):
        part = slice(index, index + 1)
        step = attention.begin(batch_of([row], memory.layout))
        alone = step.attend(0, q_TNH[part], k_TKH[part], v_TKH[part], sinks_N=sinks_N)
        assert torch.equal(together[part], alone.double())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_few_tokens_after_many_have_the_bits_of_a_prompt(dtype: str) -> None:
    memory = memory_of(2, dtype)
    row = Row([0] * 9, 1200, [BlockId(block) for block in range(1, 77)])
    noise = torch.Generator().manual_seed(0)
    q_TNH, k_TKH, v_TKH = (
        torch.randn(9, n, DIM, generator=noise).to(memory.fields["k"].dtype) for n in (4, 2, 2)
    )
    some_TNH, piece_TNH = (
        TorchAttention(memory, specs_of(memory.layout, 4), sizes)
        .begin(batch_of([row], memory.layout))
        .attend(0, q_TNH, k_TKH, v_TKH)
        for sizes in (SIZES, Sizes(max_pairs=0, few_tokens=0))
    )
    assert torch.equal(some_TNH, piece_TNH)


def test_layers_with_a_sliding_window_do_not_share_prefixes() -> None:
    rows = rows_of(GROUPS["many shared splits"][0])
    splits = Splits(BLOCK, 16)
    assert group_by_prefix(table_rows_of(rows), splits) == [(list(range(len(rows))), 0)]


def prefixes_of(tables: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Groups of rows with these block tables; a block is a split."""
    splits = Splits(SPLIT_KEYS, None)
    rows = [
        Row([0], (len(table) - 1) * SPLIT_KEYS, [BlockId(block) for block in table])
        for table in tables
    ]
    return group_by_prefix(table_rows_of(rows, SPLIT_KEYS), splits)


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
    assert prefixes_of([[1, 90], [2, 91], [1, 92], [1], [90]]) == [([1, 3, 4], 0), ([0, 2], 1)]
    assert prefixes_of([[7, 7], [7, 8]]) == [([0, 1], 1)]
    assert prefixes_of([]) == []


def test_groups_of_similar_sizes_are_computed_by_one_call() -> None:
    """The arguments are (shared splits, own splits, rows) of each group."""

    def calls(*groups: tuple[int, int, int], most: int = 1000) -> list[list[tuple[int, int]]]:
        made = [PrefixGroup(range(rows), shared, own) for shared, own, rows in groups]
        found = group_by_size(made, most)
        return [[(each.shared, each.own) for each in several] for several in found]

    assert calls((7, 1, 5), (5, 2, 3), (9, 1, 1)) == [[(9, 1), (7, 1), (5, 2)]]
    assert calls((7, 1, 5), (0, 8, 3)) == [[(7, 1)], [(0, 8)]]
    assert calls((30, 1, 5), (5, 1, 3), (3, 1, 3)) == [[(30, 1)], [(5, 1), (3, 1)]]
    assert calls((7, 1, 5), (7, 1, 5), most=79) == [[(7, 1)], [(7, 1)]]
    assert calls() == []


def test_rows_of_very_different_lengths_are_in_different_groups() -> None:
    """The arguments are the rows' numbers of splits, and the result is indexes of rows."""
    assert list(group_by_length([100, 60, 50, 49, 20, 3, 2, 1], 1000)) == [
        [0, 1, 2],
        [3],
        [4],
        [5, 6, 7],
    ]
    assert list(group_by_length([1, 4, 1], 1000)) == [[0, 1, 2]]
    assert list(group_by_length([1, 200, 1], 1000)) == [[1], [0, 2]]


def test_a_group_has_a_bounded_number_of_splits() -> None:
    assert [len(group) for group in group_by_length([25] * 10, 100)] == [4, 4, 2]
    assert list(group_by_length([300], 100)) == [[0]]


@pytest.mark.parametrize("name", ["llama-head64", "qwen3-gqa2"])
def test_ids_after_a_shared_prompt_equal_those_of_transformers(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tally, group_sizes = tiny_model(name), Tally(), []
    attend = PagedRows.attend

    def recording_attend(
        group: PagedRows,
        layer: int,
        q_RNH: torch.Tensor,
        spec: AttentionSpec,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group_sizes.append(len(q_RNH) if group.shared else 0)
        return attend(group, layer, q_RNH, spec, sinks_N)

    monkeypatch.setattr(PagedRows, "attend", recording_attend)
    engine = small_engine(folder)
    prompts = [prompt_of(528, seed=1) + prompt_of(own, seed=own) for own in (1, 7, 16, 30, 33)]
    [first] = generate_ids(engine, prompts[:1])
    group_sizes.clear()
    others = generate_ids(engine, prompts[1:])
    assert group_sizes[-1] == len(prompts) - 1
    compare_all(folder, prompts, [first, *others], tally)
    tally.check()
