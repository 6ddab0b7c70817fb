"""One step of the torch runner: order of results, independent rows, stale memory, samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton_engine.build import build_runner
from baton_engine.config.engine_config import TorchSettings
from baton_engine.interface import Row, RowResult, Sample, Sampled
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.runner.model_runner import TorchRunner
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams
from tests.support.engines.small_pool import kv_of
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import ask, decode_alone, generate_ids, small_engine

LOGPROBS = SamplingParams(temperature=0.0, logprobs=5)


@pytest.fixture
def runner(tiny_model: Callable[[str], Path]) -> TorchRunner:
    return make_runner(tiny_model("qwen3-gqa4"))


def make_runner(folder: Path) -> TorchRunner:
    return build_runner(TorchSettings(model=folder, dtype="float32", threads=1, kv_blocks=100))


def pool_of(runner: TorchRunner) -> torch.Tensor:
    memory = runner.memory
    assert isinstance(memory, TorchMemory)
    return kv_of(memory)


def blocks(first: int, count: int) -> list[BlockId]:
    return [BlockId(block) for block in range(first, first + count)]


def sampled(runner: TorchRunner, row: Row) -> Sampled:
    """The sample of a step that consists of this row only."""
    [result] = runner.launch([row]).read()
    [sample] = result.samples
    return sample


def top_logprobs(sample: Sampled) -> dict[int, float]:
    assert sample.logprobs is not None
    return {each.id: each.logprob for each in sample.logprobs.top}


def test_results_are_in_the_order_of_the_rows(runner: TorchRunner) -> None:
    rows = []
    for index, length in enumerate((40, 1, 17, 3, 1)):
        prompt = prompt_of(length, seed=index)
        rows.append(Row(prompt, 0, blocks(1 + 4 * index, 4), ask(length, LOGPROBS)))
    alone = [top_logprobs(sampled(runner, row)) for row in rows]
    order = list(range(len(rows)))
    for _ in range(3):
        random.Random(1).shuffle(order)
        results = runner.launch([rows[index] for index in order]).read()
        for index, result in zip(order, results, strict=True):
            assert top_logprobs(result.samples[0]) == pytest.approx(alone[index], abs=1e-4)


def test_a_row_without_samples_returns_none_and_its_kv_is_usable(
    runner: TorchRunner,
) -> None:
    prompt = prompt_of(50, seed=1)
    whole = sampled(runner, Row(prompt, 0, blocks(1, 4), ask(50, LOGPROBS)))
    own = blocks(10, 4)
    empty = RowResult()
    rows = [Row(prompt[:20], 0, own), Row([5], 0, blocks(20, 1))]
    assert runner.launch(rows).read() == [empty, empty]
    assert runner.launch([Row(prompt[20:49], 20, own)]).read() == [empty]
    pieces = sampled(runner, Row(prompt[49:], 49, own, ask(50, LOGPROBS)))
    assert top_logprobs(pieces) == pytest.approx(top_logprobs(whole), abs=1e-4)


def test_each_choice_of_a_row_is_sampled_with_its_own_noise(runner: TorchRunner) -> None:
    params = SamplingParams(seed=5, n=6, temperature=5.0)
    samples = tuple(Sample(choice, 20, params) for choice in range(6))
    rows = [
        Row(prompt_of(20, seed=1), 0, blocks(1, 2), samples),
        Row(prompt_of(9, seed=2), 0, blocks(5, 1), ask(9)),
    ]
    many, one = (result.samples for result in runner.launch(rows).read())
    assert (len(many), len(one)) == (6, 1)
    assert len({each.id for each in many}) > 2
    single = Row(rows[0].tokens, 0, rows[0].blocks, samples[3:4])
    assert sampled(runner, single) == many[3]


@pytest.mark.parametrize("name", ["llama-gqa1", "qwen3-gqa4"])
def test_stale_values_in_the_pool_are_never_read(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    clean, poisoned = make_runner(tiny_model(name)), make_runner(tiny_model(name))
    pool_of(poisoned)[1:].fill_(torch.nan)
    results = []
    for runner in (clean, poisoned):
        long, short = prompt_of(30, seed=1), prompt_of(7, seed=2)
        runner.launch([Row(long[:21], 0, blocks(3, 2)), Row(short, 0, blocks(9, 1))]).read()
        step = [
            Row(long[21:28], 21, blocks(3, 2)),
            Row([7], 7, blocks(9, 1), ask(8, LOGPROBS)),
        ]
        first = runner.launch(step).read()[1]
        # In a step with a longer row, attention reads the rest of the short row's block under a
        # mask.
        step = [Row(long[28:29], 28, blocks(3, 2)), Row([8], 8, blocks(9, 1), ask(9, LOGPROBS))]
        masked = runner.launch(step).read()[1]
        ids = decode_alone(runner, long, [*blocks(3, 2), *blocks(40, 4)], 40)
        results.append((first, masked, ids))
    assert results[0] == results[1]


def test_a_step_writes_only_to_the_blocks_of_its_rows(runner: TorchRunner) -> None:
    pool = pool_of(runner)
    pool.normal_()
    before = pool.clone()
    runner.launch([Row(prompt_of(20, seed=1), 0, blocks(5, 2)), Row([3], 16, blocks(30, 2))]).read()
    changed = [block for block in range(101) if not torch.equal(pool[block], before[block])]
    assert changed == [5, 6, 31]


def test_seeded_ids_are_the_same_alone_and_in_a_batch(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama-gqa4")
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=32, ignore_eos=True)
    prompts = [prompt_of(length, seed=9) for length in (5, 33, 100, 200)]
    together = generate_ids(small_engine(folder), prompts, params)
    pieces = generate_ids(small_engine(folder, max_batched_tokens=7), prompts, params)
    alone = [generate_ids(small_engine(folder), [prompt], params)[0] for prompt in prompts]
    assert together == alone == pieces
    assert len({tuple(ids) for ids in together}) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs: gpu")
def test_greedy_ids_on_cuda_equal_those_of_transformers(tiny_model: Callable[[str], Path]) -> None:
    from tests.support.engines.exactness import Tally, compare_all

    folder, tally = tiny_model("qwen3-gqa4"), Tally()
    prompts = [prompt_of(length, seed=1) for length in (1, 17, 33, 300)]
    engine = small_engine(folder, device="cuda")
    compare_all(folder, prompts, generate_ids(engine, prompts), tally)
    tally.check()
