"""A step's input: rows as arrays, how lines follow the rows' keys, and when a step is read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from baton_engine.interface import PenaltyCounts, Row, RowResult, Sample, Sampled
from baton_engine.runner.block_tables import LEAST_WIDTH
from baton_engine.runner.input_batch import InputBatch, StepInput
from baton_engine.runner.model_runner import launched
from baton_engine.sampling.metadata import KEY_A, MASS, TEMPERATURE, TOP_K, draws_of
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVGroup, KVLayout
from baton_protocol.sampling import SamplingParams

BLOCK = 4
LAYOUT = KVLayout(
    num_layers=2, num_kv_heads=1, head_dim=2, block_size=BLOCK, dtype="float32", chunk_blocks=1
)
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(seed=5, top_k=7)


def row(
    start: int,
    blocks: Sequence[int],
    *,
    tokens: int = 1,
    key: int = 0,
    params: SamplingParams = GREEDY,
    after: int | None = None,
    choices: Sequence[int] = (0,),
) -> Row:
    """A row with tokens 100 + position, and one sample per choice after its last token."""
    samples = tuple(Sample(choice, start + tokens, params) for choice in choices)
    ids = [100 + start + index for index in range(tokens)]
    return Row(ids, start, [BlockId(block) for block in blocks], samples, None, after, key)


def make(**changes: object) -> InputBatch:
    return InputBatch(msgspec.structs.replace(LAYOUT, **changes))


def tables(step: StepInput, group: int = 0) -> list[list[int]]:
    """The blocks of each line, as far as its tokens reach."""
    counts = -(-step.arrays.seq_lens_R // BLOCK)
    table_RM = step.arrays.groups[group].table_RM
    return [line[:count].tolist() for line, count in zip(table_RM, counts, strict=True)]


def test_one_token_rows_come_first_longest_first_in_a_stable_order() -> None:
    rows = [
        row(9, [1, 2, 3], tokens=2),
        row(3, [4]),
        row(8, [5, 6, 7]),
        row(0, [8], tokens=3),
        row(8, [9, 10, 11]),
    ]
    step = make().take(rows)
    assert step.rows == [rows[2], rows[4], rows[1], rows[0], rows[3]]
    assert step.line_of_R.tolist() == [3, 2, 0, 4, 1]
    arrays = step.arrays
    assert arrays.tokens_T.tolist() == [108, 108, 103, 109, 110, 100, 101, 102]
    assert arrays.positions_T.tolist() == [8, 8, 3, 9, 10, 0, 1, 2]
    assert arrays.query_starts_R1.tolist() == [0, 1, 2, 3, 5, 8]
    assert arrays.seq_lens_R.tolist() == [9, 9, 4, 11, 3]
    assert tables(step) == [[5, 6, 7], [9, 10, 11], [4], [1, 2, 3], [8]]
    slots = [7 * BLOCK, 11 * BLOCK, 4 * BLOCK + 3, 3 * BLOCK + 1, 3 * BLOCK + 2]
    assert arrays.groups[0].slots_T.tolist() == [*slots, 8 * BLOCK, 8 * BLOCK + 1, 8 * BLOCK + 2]
    assert (step.max_query_len, step.max_seq_len) == (3, 11)


def test_each_kv_group_has_its_own_table_and_slots() -> None:
    groups = (KVGroup((0,)), KVGroup((1,), window=4))
    step = make(groups=groups).take([row(9, [1, 0, 3, 0, 5, 6]), row(2, [7, 8], tokens=2)])
    assert tables(step, 0) == [[1, 3, 5], [7]]
    assert tables(step, 1) == [[0, 0, 6], [8]]
    full, windowed = step.arrays.groups
    assert full.slots_T.tolist() == [5 * BLOCK + 1, 7 * BLOCK + 2, 7 * BLOCK + 3]
    assert windowed.slots_T.tolist() == [6 * BLOCK + 1, 8 * BLOCK + 2, 8 * BLOCK + 3]


@pytest.mark.parametrize(
    ("start", "tokens", "begun"),
    [
        (0, 3, [10]),
        (0, 4, []),  # the row fills its block
        (0, 6, [11]),
        (3, 1, []),
        (4, 1, [11]),
        (5, 1, []),  # begun by an earlier step
        (5, 2, []),
        (5, 4, [12]),
        (2, 10, []),
    ],
)
def test_a_step_begins_a_block_if_it_writes_the_first_token_but_not_the_last(
    start: int, tokens: int, begun: list[int]
) -> None:
    rows = [row(2, [7]), row(start, [10, 11, 12], tokens=tokens)]
    assert make().take(rows).begun == begun


def test_a_known_line_reads_only_the_added_blocks_of_its_row() -> None:
    """The blocks of a row that the line already has are not read again; here they are -1."""
    batch = make()
    batch.take([row(3, [1], key=1), row(8, [2, 3, 4], key=2)])
    step = batch.take([row(4, [-1, 5], key=1), row(9, [-1, -1, -1], key=2)])
    assert tables(step) == [[2, 3, 4], [1, 5]]
    step = batch.take([row(5, [-1, -1, 6], tokens=4, key=1), row(10, [-1] * 3, key=2)])
    assert tables(step) == [[2, 3, 4], [1, 5, 6]]


def test_lines_follow_their_keys_when_other_rows_join_and_leave() -> None:
    batch = make()
    batch.take([row(5, [1, 2], key=1), row(9, [3, 4, 5], key=2, params=DRAWN)])
    batch.take([row(10, [-1] * 3, key=2, params=DRAWN), row(30, [6] * 8, key=3)])
    step = batch.take([row(11, [-1] * 3, key=2, params=DRAWN), row(6, [7, 8], key=1)])
    assert tables(step) == [[3, 4, 5], [7, 8]]  # key 1 had left, so its line is new
    assert step.sampling.columns_6S[TOP_K].tolist() == [7, 0]


def test_a_line_without_a_key_is_filled_again() -> None:
    batch = make()
    batch.take([row(5, [1, 2])])
    assert tables(batch.take([row(6, [3, 4])])) == [[3, 4]]


def test_a_key_with_other_parameters_gets_their_columns() -> None:
    batch = make()
    batch.take([row(5, [1, 2], key=1, params=DRAWN)])
    step = batch.take([row(6, [1, 2], key=1, params=SamplingParams(seed=6, top_k=9))])
    assert step.sampling.columns_6S[TOP_K].tolist() == [9]


def test_the_blocks_of_a_row_that_does_not_advance_are_read_again() -> None:
    batch = make()
    for blocks in ([1, 2], [1, 3]):
        assert tables(batch.take([row(4, blocks, key=1)])) == [blocks]
    assert tables(batch.take([row(3, [4], key=1)])) == [[4]]


def test_block_tables_widen_as_rows_grow() -> None:
    batch = make()
    many = list(range(1, 3 * LEAST_WIDTH))
    batch.take([row(2, many[:1], key=1)])
    assert tables(batch.take([row(BLOCK * len(many) - 1, many, key=1)])) == [many]


def test_samples_are_in_the_order_of_the_lines_and_know_their_tokens() -> None:
    """The lines are c, d, a, b, so a's two samples follow those of c and d."""
    rows = [
        row(5, [1, 2], tokens=2, choices=(0, 1)),
        row(0, [3], tokens=3, choices=()),
        row(9, [4] * 3),
        row(8, [5] * 3, choices=(0, 2, 5)),
    ]
    sampling = make().take(rows).sampling
    assert [each.choice for each in sampling.samples] == [0, 0, 2, 5, 0, 1]
    assert sampling.hidden_S.tolist() == [0, 1, 1, 1, 3, 3]
    assert sampling.place_of_S.tolist() == [4, 5, 0, 1, 2, 3]
    assert not sampling.one_each
    assert make().take([rows[1]]).sampling.hidden_S.tolist() == []


def test_a_row_may_sample_after_several_of_its_tokens() -> None:
    one = row(4, [1, 2], tokens=4, choices=())
    samples = tuple(Sample(0, position, GREEDY) for position in (6, 7, 8))
    rows = [row(9, [3, 4, 5]), msgspec.structs.replace(one, samples=samples)]
    assert make().take(rows).sampling.hidden_S.tolist() == [0, 2, 3, 4]


def test_an_awaited_token_is_the_place_of_the_previous_steps_sample() -> None:
    batch = make()
    first = batch.take([row(3, [1], key=1), row(8, [2] * 3, key=2)])
    places = first.sampling.place_of_S
    assert places.tolist() == [1, 0]
    assert not first.awaits
    rows = [row(9, [2] * 3, key=2, after=1), row(4, [1] * 2, key=1, after=0), row(0, [3], tokens=2)]
    step = batch.take(rows, places)
    assert step.awaits
    assert step.arrays.awaits_T.tolist() == [0, 1, -1, -1]


def test_columns_equal_those_of_draws_of_and_noise_keys_follow_the_position() -> None:
    batch, draw = make(), random.Random(0)
    kinds = [GREEDY, DRAWN, SamplingParams(seed=-2, top_p=0.5), SamplingParams(seed=7, min_p=0.1)]
    for step in range(5):
        rows = [
            row(
                20 - number + step,
                [1] * 9,
                tokens=1 + (step == 3),
                key=number + 1,
                params=kinds[number],
                choices=(number,),
            )
            for number in range(4)
        ]
        draw.shuffle(rows)
        sampling = batch.take(rows).sampling
        expected = draws_of(sampling.samples, CPU).host_6S
        drawn = expected[TEMPERATURE] > 0  # greedy samples use no noise
        actual = sampling.columns_6S
        np.testing.assert_array_equal(actual[:KEY_A], expected[:KEY_A])
        np.testing.assert_array_equal(actual[:, drawn], expected[:, drawn])
        assert sampling.filtered


def test_a_batch_without_filters_is_not_marked_as_filtered() -> None:
    plain = SamplingParams(seed=1, temperature=0.7)
    cold = SamplingParams(temperature=0.0, top_k=3)
    step = make().take([row(5, [1, 2], params=plain), row(4, [3, 4], params=cold)])
    assert not step.sampling.filtered
    assert (step.sampling.columns_6S[MASS].view(np.float32) >= 1).all()


SPECIAL = {
    "bans": ({"banned": (4,)}, True, {}),
    "penalties": ({"penalty_counts": PenaltyCounts((1,), {})}, True, {}),
    "biases": ({"params": SamplingParams(logit_bias=((1, 1.0),))}, True, {}),
    "allowed ids": ({"params": SamplingParams(allowed_token_ids=(1,))}, True, {}),
    "logprobs": ({"params": SamplingParams(logprobs=3)}, False, {1: 3}),
    "filters": ({"params": DRAWN}, False, {}),
}


@pytest.mark.parametrize(("changes", "changed", "asking"), SPECIAL.values(), ids=SPECIAL)
def test_only_samples_that_change_logits_or_want_logprobs_are_listed(
    changes: dict[str, object], changed: bool, asking: dict[int, int]
) -> None:
    special = row(5, [1, 2], key=2)
    [sample] = special.samples
    special = msgspec.structs.replace(
        special, samples=(msgspec.structs.replace(sample, **changes),)
    )
    sampling = make().take([row(9, [3] * 3, key=1), special, row(2, [4], key=3)]).sampling
    assert list(sampling.changed) == ([1] if changed else [])
    assert sampling.asking == asking


class Event:
    """A fake CUDA event that logs its calls."""

    log: list[str]

    def record(self, stream: object) -> None:
        self.log.append(f"recorded on {stream}")

    def synchronize(self) -> None:
        self.log.append("waited")


def test_a_step_on_a_gpu_is_read_after_the_event_recorded_at_its_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Event.log = log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")

    def finish() -> list[RowResult]:
        log.append("finished")
        return [RowResult((Sampled(7),))]

    step = launched(finish, torch.device("cuda:1"))
    assert log == ["recorded on the stream of cuda:1"]
    assert step.read() == [RowResult((Sampled(7),))]
    assert log[1:] == ["waited", "finished"]


def test_on_a_cpu_a_step_is_read_when_it_is_launched() -> None:
    memory = [7]
    step = launched(lambda: [RowResult((Sampled(memory[0]),))], torch.device("cpu"))
    memory[0] = 8  # the next step overwrites the memory
    assert step.read() == [RowResult((Sampled(7),))]
