"""The batch of plain decode steps: its lines, and how they follow the requests' keys."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch

from baton_engine.interface import PenaltyCounts, PromptAsk, Row, Sample
from baton_engine.runner.batch_layout import after_of, plain_rows
from baton_engine.runner.input_batch import LEAST_WIDTH, Batch, BatchArrays
from baton_engine.sampling.metadata import KEY_A, MASS, TEMPERATURE, TOP_K, draws_of
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams

BLOCK = 4
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(seed=5, top_k=7)


def row(
    start: int,
    blocks: list[int],
    *,
    key: int = 0,
    params: SamplingParams = GREEDY,
    after: int | None = None,
    choice: int = 0,
) -> Row:
    sample = Sample(choice, start + 1, params)
    ids = [BlockId(block) for block in blocks]
    return Row([100 + start], start, ids, (sample,), None, after, key)


def take(arrays: BatchArrays, rows: list[Row]) -> Batch:
    batch = arrays.take(rows)
    assert batch is not None
    return batch


def tables(arrays: BatchArrays) -> list[list[int]]:
    held = arrays.tables
    return [line[:count].tolist() for line, count in zip(held.table_RW, held.counts_R, strict=True)]


def test_lines_are_sorted_longest_first_and_map_to_their_rows() -> None:
    arrays = BatchArrays(BLOCK)
    rows = [row(3, [1]), row(9, [2, 3, 4]), row(4, [5, 6])]
    batch = take(arrays, rows)
    assert batch.order_R.tolist() == [1, 2, 0]
    assert batch.line_of_R.tolist() == [2, 0, 1]
    assert batch.tokens_R.tolist() == [109, 104, 103]
    assert batch.starts_R.tolist() == [9, 4, 3]
    assert batch.rows == [rows[1], rows[2], rows[0]]
    assert tables(arrays) == [[2, 3, 4], [5, 6], [1]]
    assert arrays.tables.slots().tolist() == [4 * BLOCK + 1, 6 * BLOCK, 1 * BLOCK + 3]


def test_a_step_begins_the_blocks_whose_first_token_it_writes() -> None:
    assert take(BatchArrays(BLOCK), [row(7, [1, 2]), row(8, [3, 4, 5])]).begun == [5]
    assert take(BatchArrays(1), [row(1, [1, 2])]).begun == []  # the token fills its block


def test_a_known_line_reads_only_the_added_blocks_of_its_row() -> None:
    """The blocks of a row that the line already has are not read again; here they are -1."""
    arrays = BatchArrays(BLOCK)
    take(arrays, [row(3, [1], key=1), row(8, [2, 3, 4], key=2)])
    take(arrays, [row(4, [-1, 5], key=1), row(9, [-1, -1, -1], key=2)])
    assert tables(arrays) == [[2, 3, 4], [1, 5]]
    # Blocks were added during steps of other kinds.
    take(arrays, [row(13, [-1, -1, 6, 7], key=1), row(21, [-1, -1, -1, 8, 9, 10], key=2)])
    assert tables(arrays) == [[2, 3, 4, 8, 9, 10], [1, 5, 6, 7]]


def test_lines_follow_their_keys_when_other_rows_join_and_leave() -> None:
    arrays = BatchArrays(BLOCK)
    take(arrays, [row(5, [1, 2], key=1), row(9, [3, 4, 5], key=2, params=DRAWN)])
    take(arrays, [row(10, [-1] * 3, key=2, params=DRAWN), row(30, [6] * 8, key=3)])
    batch = take(arrays, [row(11, [-1] * 3, key=2, params=DRAWN), row(6, [7, 8], key=1)])
    assert tables(arrays) == [[3, 4, 5], [7, 8]]  # key 1 had left, so its line is new
    assert batch.columns_6R[TOP_K].tolist() == [7, 0]


@pytest.mark.parametrize("key", [0, 1])
def test_lines_are_filled_again_for_rows_without_a_key_or_with_other_parameters(key: int) -> None:
    arrays = BatchArrays(BLOCK)
    take(arrays, [row(5, [1, 2], key=key, params=DRAWN)])
    other = DRAWN if key == 0 else SamplingParams(seed=6, top_k=7)
    take(arrays, [row(6, [3, 4], key=key, params=other)])
    assert tables(arrays) == [[3, 4]]


def test_the_blocks_of_a_row_that_does_not_advance_are_read_again() -> None:
    arrays = BatchArrays(BLOCK)
    for blocks in ([1, 2], [1, 3]):
        take(arrays, [row(4, blocks, key=1)])
        assert tables(arrays) == [blocks]
    take(arrays, [row(3, [4], key=1)])
    assert tables(arrays) == [[4]]


def test_block_tables_widen_as_rows_grow() -> None:
    arrays = BatchArrays(BLOCK)
    many = list(range(1, 3 * LEAST_WIDTH))
    take(arrays, [row(2, many[:1], key=1)])
    take(arrays, [row(BLOCK * len(many) - 1, many, key=1)])
    assert tables(arrays) == [many]


def test_columns_equal_those_of_draws_of_and_noise_keys_follow_the_position() -> None:
    arrays, draw = BatchArrays(BLOCK), random.Random(0)
    kinds = [GREEDY, DRAWN, SamplingParams(seed=-2, top_p=0.5), SamplingParams(seed=7, min_p=0.1)]
    for step in range(5):
        rows = [
            row(20 - number + step, [1] * 9, key=number + 1, params=kinds[number], choice=number)
            for number in range(4)
        ]
        draw.shuffle(rows)
        batch = take(arrays, rows)
        samples = [one for each in batch.rows for one in each.samples]
        expected = draws_of(samples, CPU).host_6S
        drawn = expected[TEMPERATURE] > 0  # greedy samples use no noise
        np.testing.assert_array_equal(batch.columns_6R[:KEY_A], expected[:KEY_A])
        np.testing.assert_array_equal(batch.columns_6R[:, drawn], expected[:, drawn])
        assert batch.filtered


def test_a_batch_without_filters_is_not_marked_as_filtered() -> None:
    plain = SamplingParams(seed=1, temperature=0.7)
    cold = SamplingParams(temperature=0.0, top_k=3)
    batch = take(BatchArrays(BLOCK), [row(5, [1, 2], params=plain), row(4, [3, 4], params=cold)])
    assert not batch.filtered
    assert (batch.columns_6R[MASS].view(np.float32) >= 1).all()


def other_rows() -> dict[str, Row]:
    plain = row(5, [1, 2])
    [sample] = plain.samples
    replace = msgspec.structs.replace

    def with_params(**values: object) -> Row:
        return replace(plain, samples=(replace(sample, params=replace(GREEDY, **values)),))

    return {
        "more tokens": replace(plain, tokens=[1, 2]),
        "no sample": replace(plain, samples=()),
        "several samples": replace(plain, samples=(sample, sample)),
        "prompt logprobs": replace(plain, prompt=PromptAsk((3,), 1)),
        "bans": replace(plain, samples=(replace(sample, banned=(4,)),)),
        "penalties": replace(plain, samples=(replace(sample, seen=PenaltyCounts((1,), {})),)),
        "logprobs": with_params(logprobs=0),
        "biases": with_params(logit_bias=((1, 1.0),)),
        "allowed ids": with_params(allowed_token_ids=(1,)),
    }


@pytest.mark.parametrize("kind", other_rows())
def test_a_row_of_another_kind_makes_the_step_not_plain_and_changes_no_line(kind: str) -> None:
    arrays = BatchArrays(BLOCK)
    take(arrays, [row(5, [1, 2], key=1)])
    assert arrays.take([row(6, [1, 2], key=1), other_rows()[kind]]) is None
    take(arrays, [row(7, [-1, -1], key=1)])
    assert tables(arrays) == [[1, 2]]


@pytest.mark.parametrize(
    ("after", "expected"),
    [([None, None], None), ([1, 0], [1, 0]), ([None, 0, 2], [-1, 0, 2])],
)
def test_after_of_gives_the_awaited_sample_of_each_row(
    after: list[int | None], expected: list[int] | None
) -> None:
    actual = after_of(after)
    assert (None if actual is None else actual.tolist()) == expected


def test_plain_rows_are_in_the_order_of_the_call() -> None:
    rows = [row(5, [1, 2], key=7, after=3), row(9, [1] * 3, key=8, choice=2)]
    columns = plain_rows(rows)
    assert columns is not None
    assert columns.tokens_R.tolist() == [105, 109]
    assert columns.starts_R.tolist() == [5, 9]
    assert columns.after_R is not None
    assert columns.after_R.tolist() == [3, -1]
    assert (columns.keys, columns.choices) == ([7, 8], [0, 2])
