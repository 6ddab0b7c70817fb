"""The torch engine's greedy ids equal those of transformers, alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from baton_engine.build import build_runner
from baton_engine.config.engine_config import TorchSettings
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Row
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams
from tests.support.engines.exactness import Tally, compare, compare_all, reference
from tests.support.engines.tiny_models import (
    BRIDGE_MODELS,
    EACH_FAMILY,
    EXPERT_MODELS,
    MORE_MODELS,
    TINY_MODELS,
    prompt_of,
)
from tests.support.engines.torch_engines import ask, decode_alone, generate_ids, small_engine

NEW_TOKENS = 40  # past two ends of a block
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
# Of a prompt that runs alone, one token per step: past the end of its block, and of a window's.
ALONE = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
BLOCK = 16
CHUNK = 32
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 600)
PROMPTS = [prompt_of(length, seed=seed) for length in LENGTHS for seed in (1, 2)]
ONE_OF_EACH = PROMPTS[::2]  # one of each length
ALL_MODELS = [*TINY_MODELS, *MORE_MODELS, *EXPERT_MODELS, *BRIDGE_MODELS]
ALL_KINDS = [*EACH_FAMILY, *BRIDGE_MODELS]
MAIN = (
    "llama-gqa4",
    "llama3-rope",
    "mistral-window",
    "qwen3-gqa2",
    "qwen3-window",
    "phi3-partial-window",
    "gemma2",
    "gpt-oss",
    "glm4-moe",
    "deepseek-v3",
    "gemma4",
)

Report = Callable[[str, object], None]


def with_and_without_overlap(names: Iterable[str], elsewhere: Sequence[str] = ()) -> list[Any]:
    """Each model with and without overlap. `make test` runs only the MAIN models, alternately
    without and with overlap, except those that it runs `elsewhere` in this file; `make test-long`
    runs the rest."""
    cases = []
    for name, overlap in product(names, ("off", "on")):
        runs = name in MAIN and MAIN.index(name) % 2 == (overlap == "on")
        runs = runs and name not in elsewhere
        cases.append(pytest.param(name, overlap, marks=[] if runs else [pytest.mark.long]))
    return cases


def compare_batch(
    engine: EngineCore, prompts: Sequence[Sequence[int]], folder: Path, tally: Tally, label: str
) -> None:
    ids = generate_ids(engine, prompts, GREEDY)
    compare_all(folder, prompts, ids, tally, label, new_tokens=NEW_TOKENS)


@pytest.mark.shows("alone", "in batches", "cached")
@pytest.mark.parametrize(
    ("name", "overlap"), with_and_without_overlap(ALL_MODELS, elsewhere=("gemma4", "glm4-moe"))
)
def test_ids_equal_those_of_transformers_cold_warm_alone_and_in_a_batch(
    name: str, overlap: str, tiny_model: Callable[[str], Path], record_property: Report
) -> None:
    folder, tally = tiny_model(name), Tally()
    engine = small_engine(folder, overlap=overlap)
    compare_batch(engine, PROMPTS, folder, tally, "cold batch")
    assert engine.load().cached_prompt_tokens_total == 0
    compare_batch(engine, PROMPTS, folder, tally, "warm batch")
    assert engine.load().cached_prompt_tokens_total > 1000
    engine = small_engine(folder, overlap=overlap)
    alone = [generate_ids(engine, [prompt], ALONE)[0] for prompt in ONE_OF_EACH]
    compare_all(folder, ONE_OF_EACH, alone, tally, "alone", new_tokens=ALONE.max_tokens)
    record_property("exactness", f"{name}, overlap {overlap}: {tally}")
    tally.check()


@pytest.mark.shows("chunked")
@pytest.mark.parametrize(
    ("name", "overlap"), with_and_without_overlap(ALL_KINDS, elsewhere=("gpt-oss",))
)
def test_ids_equal_those_of_transformers_with_7_tokens_per_step(
    name: str, overlap: str, tiny_model: Callable[[str], Path], record_property: Report
) -> None:
    folder, tally = tiny_model(name), Tally()
    engine = small_engine(folder, max_batched_tokens=7, overlap=overlap)
    compare_batch(engine, ONE_OF_EACH, folder, tally, "7 tokens per step")
    record_property("exactness", f"{name}: {tally}")
    tally.check()


@pytest.mark.shows("preempted")
@pytest.mark.parametrize(("name", "overlap"), with_and_without_overlap(ALL_KINDS))
def test_ids_equal_those_of_transformers_when_requests_are_preempted(
    name: str, overlap: str, tiny_model: Callable[[str], Path], record_property: Report
) -> None:
    folder, tally = tiny_model(name), Tally()
    engine = small_engine(folder, kv_blocks=48, overlap=overlap)
    compare_batch(engine, PROMPTS, folder, tally, "preempted")
    assert engine.load().preemptions_total > 0
    record_property("exactness", f"{name}: {tally}")
    tally.check()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in MAIN else [pytest.mark.long]) for n in ALL_MODELS],
)
def test_a_wrong_kv_block_changes_the_ids(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Otherwise the tests above would not detect wrong KV."""
    folder = tiny_model(name)
    settings = TorchSettings(model=folder, dtype="float32", threads=1, kv_blocks=60, block_size=16)
    runner = build_runner(settings)
    layout = runner.memory.layout
    groups = layout.num_groups
    prompt, other = prompt_of(48, seed=3), prompt_of(48, seed=4)
    own = [BlockId(1 + index) for index in range(8 * groups)]
    foreign = [BlockId(1 + len(own) + index) for index in range(8 * groups)]
    [first] = runner.launch([Row(prompt, 0, own, ask(48))]).read()[0].samples
    runner.launch([Row(other, 0, foreign)]).read()
    snapshot = bytearray(layout.block_bytes * len(own))
    runner.memory.read(own, memoryview(snapshot))
    undisturbed = decode_alone(runner, [*prompt, first.id], own, NEW_TOKENS - 1)
    expected = reference(folder, prompt, NEW_TOKENS, [first.id, *undisturbed])
    compare(expected, [first.id, *undisturbed], Tally(), name)

    runner.memory.write(own, memoryview(snapshot))
    span = bytearray(layout.block_bytes * groups)
    runner.memory.read(foreign[groups : 2 * groups], memoryview(span))
    runner.memory.write(own[groups : 2 * groups], memoryview(span))
    assert decode_alone(runner, [*prompt, first.id], own, NEW_TOKENS - 1) != undisturbed
