"""Decode steps: padded to a size, in fixed buffers, with one step launched ahead."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton_engine.attention.interface import StepArrays
from baton_engine.config.buckets import buckets
from baton_engine.interface import PenaltyCounts, Row, Sample
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.runner.input_buffers import StepShape, pad
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.staging_buffers import Staging
from tests.support.engines.decoding import (
    GREEDY,
    KINDS,
    Driver,
    OverwrittenCopy,
    RecordingGraphs,
    Stream,
    alone,
    make_runner,
    spoiled_staging,
    streams,
)
from tests.support.engines.small_pool import kv_of

Folders = Callable[[str], Path]
LENGTHS = (5, 30, 17, 8, 1, 23, 16, 40, 7, 12)
STEPS = 20  # tokens, more than two blocks
SIZES = (1, 2, 4, 8, 10)
MODEL = "llama-gqa2-tied"


@pytest.fixture(scope="module")
def expected(tiny_model: Folders) -> list[list[int]]:
    return alone(make_runner(tiny_model(MODEL)), LENGTHS, STEPS)


def pool_of(runner: TorchRunner) -> torch.Tensor:
    memory = runner.memory
    assert isinstance(memory, TorchMemory)
    return kv_of(memory)


def with_logprobs(row: Row) -> Row:
    """The row with logprobs. The id is the same."""
    [sample] = row.samples
    params = msgspec.structs.replace(sample.params, logprobs=1)
    return msgspec.structs.replace(row, samples=(Sample(0, sample.position, params),))


def prefilled(runner: TorchRunner, count: int = len(LENGTHS)) -> tuple[Driver, list[Stream]]:
    """Streams whose prompts were computed in one step."""
    made, driver = streams(LENGTHS[:count]), Driver(runner)
    driver.step(made)
    driver.read()
    return driver, made


@pytest.mark.parametrize("top", [1, 2, 3, 8, 9, 216, 250, 256, 257, 272, 300, 512])
def test_buckets_ascend_beyond_the_largest_batch_with_a_bounded_padding(top: int) -> None:
    sizes = buckets(top)
    assert {1, top} <= set(sizes)
    assert sizes[-1] == min(16 * top, top + 256)  # all rows may have 16 tokens, within reason
    assert list(sizes) == sorted(set(sizes))
    for lines in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= lines)
        assert padded - lines < (32 if lines > top else 16 if lines > 256 else 8)


def test_buckets_double_up_to_8_and_then_grow_by_8_by_16_and_by_32() -> None:
    assert buckets(40)[:10] == (1, 2, 4, 8, 16, 24, 32, 40, 64, 96)
    assert buckets(40)[-2:] == (288, 296)
    assert buckets(300)[33:40] == (248, 256, 272, 288, 300, 320, 352)
    assert len(buckets(256)) == 43


@pytest.mark.pairwise
@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read a step late"])
@pytest.mark.parametrize("sizes", [(), SIZES], ids=["unpadded", "padded"])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9, 10])
def test_ids_equal_those_of_each_request_alone(
    count: int, sizes: tuple[int, ...], late: bool, tiny_model: Folders, expected: list[list[int]]
) -> None:
    runner = make_runner(tiny_model(MODEL), sizes=sizes)
    driver, made = prefilled(runner, count)
    for _ in range(STEPS - 1):
        driver.step(made, late=late)
    driver.read()
    assert [each.given for each in made] == expected[:count]


def test_a_step_uses_no_inputs_of_an_earlier_step(
    tiny_model: Folders, expected: list[list[int]]
) -> None:
    runner = make_runner(tiny_model(MODEL), sizes=SIZES, make_staging=spoiled_staging)
    driver, made = prefilled(runner)
    for number in range(STEPS - 1):
        driver.step(made[: 3 + number % 8], late=True)
    driver.read()
    for each, ids in zip(made, expected, strict=True):
        assert each.given == ids[: len(each.given)]
    assert len(made[0].given) == STEPS


def test_a_step_is_padded_to_the_smallest_size_that_fits_or_runs_unpadded(
    tiny_model: Folders, expected: list[list[int]]
) -> None:
    recorder = RecordingGraphs()
    driver, made = prefilled(make_runner(tiny_model(MODEL), sizes=(2, 4, 8), recorder=recorder))
    recorder.sizes.clear()
    for count in (10, 8, 5, 4, 3, 2, 1):
        driver.step(made[:count], late=True)
    driver.read()
    assert recorder.sizes == [8, 8, 4, 4, 2, 2]
    assert [each.given for each in made] == [
        ids[: len(each.given)] for each, ids in zip(made, expected, strict=True)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": 2},
        {"logit_bias": ((3, 0.5),)},
        {"allowed_token_ids": tuple(range(50))},
        {"frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_the_parameters_of_one_row_do_not_change_how_a_step_is_computed(
    changes: dict[str, Any], tiny_model: Folders, expected: list[list[int]]
) -> None:
    """Sampling is not part of the recorded step. The other rows get the same ids."""

    def change(row: Row) -> Row:
        [sample] = row.samples
        if row.blocks_id != 2:
            return row
        params = msgspec.structs.replace(sample.params, **changes)
        seen = PenaltyCounts((1, 2), {3: 1}) if params.penalized else None
        return msgspec.structs.replace(row, samples=(Sample(0, sample.position, params, (), seen),))

    recorder = RecordingGraphs()
    driver, made = prefilled(make_runner(tiny_model(MODEL), sizes=SIZES, recorder=recorder), 4)
    recorder.sizes.clear()
    for _ in range(8):
        driver.step(made, late=True, change=change)
    driver.read()
    assert recorder.sizes == [4] * 8
    for number in (0, 2, 3):
        assert made[number].given == expected[number][:9]


@pytest.mark.parametrize("sizes", [(), SIZES], ids=["unpadded", "padded"])
def test_ids_stay_the_same_when_rows_change_places_leave_and_return(
    sizes: tuple[int, ...], tiny_model: Folders, expected: list[list[int]]
) -> None:
    """The other rows advance while a row is away. When it returns, its key is new to the batch."""
    driver, made = prefilled(make_runner(tiny_model(MODEL), sizes=sizes))
    batches = [made, made[::-1], made[2:], made[5:] + made[:5], made[:1], made[1::2], made]
    for batch in batches * 2:
        driver.step(batch, late=True)
    driver.read()
    for each, ids in zip(made, expected, strict=True):
        assert each.given == ids[: len(each.given)]


@pytest.mark.parametrize("sizes", [(), SIZES], ids=["unpadded", "padded"])
def test_steps_with_prompts_and_logprobs_can_be_launched_ahead_of_each_other(
    sizes: tuple[int, ...], tiny_model: Folders, expected: list[list[int]]
) -> None:
    """Prompts join while others decode, and some steps compute logprobs."""
    made = streams(LENGTHS)
    driver = Driver(make_runner(tiny_model(MODEL), sizes=sizes))
    driver.step(made[:4])
    for number in range(STEPS - 1):
        batch = made[: 4 + number // 2]
        driver.step(batch, late=True, change=with_logprobs if number % 5 == 3 else lambda row: row)
    driver.read()
    for each, ids in zip(made, expected, strict=True):
        assert each.given == ids[: len(each.given)]
    assert len(made[0].given) == STEPS


@pytest.mark.parametrize("seed", range(6))
def test_ids_do_not_depend_on_the_batch_or_on_when_steps_are_read(
    seed: int, tiny_model: Folders, expected: list[list[int]]
) -> None:
    draw = random.Random(seed)
    sizes = draw.choice([(), SIZES, (3, 7), (10,)])
    made = streams(LENGTHS)
    driver = Driver(make_runner(tiny_model(MODEL), sizes=sizes, make_staging=spoiled_staging))
    for _ in range(40):
        going = [each for each in made if len(each.given) < STEPS - 1]
        batch = draw.sample(going, draw.randint(1, len(going))) if going else made[:1]
        plain = draw.random() < 0.8
        driver.step(
            batch, late=draw.random() < 0.8, change=(lambda row: row) if plain else with_logprobs
        )
    driver.read()
    for each, ids in zip(made, expected, strict=True):
        assert each.given[:STEPS] == ids[: len(each.given)]


def test_a_key_with_different_parameters_is_a_different_request(tiny_model: Folders) -> None:
    """The second request has the blocks of the first, in another order."""
    runner = make_runner(tiny_model(MODEL), sizes=SIZES)
    first, second = streams(LENGTHS[:1], [GREEDY])[0], streams(LENGTHS[:1], [KINDS[1]])[0]
    second.blocks = first.blocks[::-1]
    for each in (first, second):
        driver = Driver(runner)
        for _ in range(STEPS):
            driver.step([each])
        driver.read()
    fresh = streams(LENGTHS[:1], [KINDS[1]])[0]
    driver = Driver(make_runner(tiny_model(MODEL)))
    for _ in range(STEPS):
        driver.step([fresh])
    driver.read()
    assert second.given == fresh.given


def test_a_relaunched_step_uses_the_current_blocks_of_its_row(tiny_model: Folders) -> None:
    """A step is launched ahead, dropped, and launched again after the row's newest block was
    replaced."""
    runner = make_runner(tiny_model(MODEL), sizes=SIZES)
    stream = streams((15,), [GREEDY])[0]
    driver = Driver(runner)
    driver.step([stream])
    driver.read()
    dropped = stream.row()
    runner.launch([dropped])  # token 15, the last of its block
    driver.step([stream])
    driver.read()
    runner.launch([stream.row()])  # token 16, the first of the next block
    stream.blocks[2] = stream.blocks.pop()
    for _ in range(8):
        driver.step([stream])
    driver.read()
    assert stream.given == alone(make_runner(tiny_model(MODEL)), (15,), 10)[0]


def test_padding_and_warm_up_write_no_block_and_stale_lines_are_not_read(
    tiny_model: Folders, expected: list[list[int]]
) -> None:
    runner = make_runner(tiny_model(MODEL), sizes=SIZES)
    pool = pool_of(runner)
    pool[1:].fill_(torch.nan)
    for size in runner.buckets[::-1]:
        runner.warm(size)
    assert bool(pool[1:].isnan().all())
    assert bool(pool[0].isfinite().all())
    driver, made = prefilled(runner)
    driver.step(made)
    driver.read()
    kept = {int(block) for block in made[0].blocks}
    for block in range(1, pool.shape[0]):
        if block not in kept:
            pool[block] = torch.nan  # the blocks of the nine other streams, which have finished
    for _ in range(STEPS - 2):
        driver.step(made[:1], late=True)
    driver.read()
    assert made[0].given == expected[0]


@pytest.mark.parametrize("sizes", [(), SIZES], ids=["unpadded", "padded"])
def test_a_step_clears_the_rest_of_a_block_that_it_begins(
    sizes: tuple[int, ...], tiny_model: Folders
) -> None:
    """Attention over copied blocks reads that rest under a mask, and NaN times a weight of 0 is
    NaN."""
    runner = make_runner(tiny_model(MODEL), sizes=sizes)
    pool_of(runner)[1:].fill_(torch.nan)
    made, driver = streams((16, 3)), Driver(runner)
    for _ in range(2):
        driver.step(made)
    driver.read()
    assert bool(pool_of(runner)[made[0].blocks[2]].isfinite().all())
    assert bool(pool_of(runner)[made[0].blocks[3]].isnan().all())


def test_an_unpadded_runner_has_no_sizes_to_warm_up(tiny_model: Folders) -> None:
    assert make_runner(tiny_model(MODEL)).buckets == ()


def flat(arrays: StepArrays[Any]) -> list[Any]:
    tokens = [arrays.tokens_T, arrays.positions_T, arrays.awaits_T]
    groups = [part for each in arrays.groups for part in (each.slots_T, each.table_RM)]
    return [*tokens, arrays.query_starts_R1, arrays.seq_lens_R, *groups]


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "groups"),
    [(1, 1, 3, 1), (8, 8, 12, 1), (40, 33, 1, 2), (250, 250, 40, 3)],
)
def test_the_arrays_of_a_buffer_are_aligned_and_do_not_overlap(
    tokens: int, rows: int, width: int, groups: int
) -> None:
    shape = StepShape(tokens, rows, width, groups)
    host = np.zeros(shape.size, np.int32)
    parts = flat(shape.arrays_in(host))
    for number, part in enumerate(parts, start=1):
        assert (part.ctypes.data - host.ctypes.data) % (16 if part.ndim == 2 else 128) == 0
        assert not part.any()
        part[...] = number
    assert [int(part.min()) for part in parts] == [int(part.max()) for part in parts]
    device = shape.arrays_in(torch.from_numpy(host))
    for part, copy in zip(parts, flat(device), strict=True):
        assert copy.dtype == (torch.int64 if part.dtype == np.int64 else torch.int32)
        assert copy.tolist() == part.tolist()
    assert device.groups[-1].table_RM.shape == (rows, width)


def test_a_padding_line_is_a_token_in_block_0_that_is_not_stored() -> None:
    shape = StepShape(5, 5, 3, 2)
    arrays = shape.arrays_in(np.full(shape.size, 99, np.int32))
    pad(arrays, 2)
    expected = [
        *((arrays.tokens_T, 0), (arrays.positions_T, 0), (arrays.awaits_T, -1)),
        (arrays.seq_lens_R, 1),
        *((group.slots_T, -1) for group in arrays.groups),
        *((group.table_RM[:, :1], 0) for group in arrays.groups),
    ]
    for part, value in expected:
        assert (part[2:] == value).all()
        assert (part[:2] == np.full(part.dtype.itemsize // 4, 99, np.int32).view(part.dtype)).all()
    assert arrays.query_starts_R1.tolist() == [99, 99, 2, 3, 4, 5]


def test_a_pinned_buffer_is_reused_only_after_its_copy_is_done() -> None:
    hosts = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    copies = [OverwrittenCopy(host) for host in hosts]
    staging = Staging(4, torch.device("cpu"), list(zip(hosts, copies, strict=True)))
    written = []
    for number in range(1, 5):
        host = staging.next()
        assert host.tolist() == [-7_777_777] * 4  # synchronize() was called
        host[:] = number
        written.append(next(i for i, each in enumerate(hosts) if each[0] == number))
        staging.send(3)
        assert staging.buffer.tolist() == [number] * 3 + [0]
    assert written[0] != written[1]
    assert written[:2] == written[2:]
    assert [each.copies for each in copies] == [2, 2]


def test_on_a_cpu_the_staging_buffer_is_the_device_buffer() -> None:
    staging = Staging(64, torch.device("cpu"))
    staging.next()[:3] = [1, 2, 3]
    staging.send(64)
    assert staging.buffer[:4].tolist() == [1, 2, 3, 0]
