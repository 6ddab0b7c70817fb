"""A whole engine with kernels: its greedy ids equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.engines.exactness import Tally, compare_all
from tests.support.engines.kernels import DEVICE
from tests.support.engines.quantized.quantized_models import make_quantized
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import GREEDY, generate_ids, small_engine

NEW_TOKENS = 4
PROMPTS = [prompt_of(length, seed=9) for length in (3, 50)]

Report = Callable[[str, object], None]


@pytest.mark.parametrize(
    "name",
    [
        "phi3-partial-window",
        "gemma2",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("llama-gqa4", "mistral-window", "qwen3-window", "gpt-oss")
        ),
    ],
)
def test_ids_equal_those_of_transformers_with_chunked_prefill_and_from_the_cache(
    name: str, tiny_model: Callable[[str], Path], record_property: Report
) -> None:
    folder, tally = tiny_model(name), Tally()
    engine = small_engine(folder, kernels="triton", device=DEVICE.type, max_batched_tokens=24)
    params = msgspec.structs.replace(GREEDY, max_tokens=NEW_TOKENS)
    for label in ("cold", "warm"):
        actual = generate_ids(engine, PROMPTS, params)
        compare_all(folder, PROMPTS, actual, tally, label, new_tokens=NEW_TOKENS)
    assert engine.load().cached_prompt_tokens_total > 0
    record_property("exactness", f"{name}, kernels: {tally}")
    tally.check()


@pytest.mark.long
@pytest.mark.parametrize("batch_invariant", ["off", "on"])
@pytest.mark.parametrize("name", ["llama-gqa4", "gemma2"])
def test_ids_in_float16_equal_those_of_transformers(
    name: str, batch_invariant: str, tiny_model: Callable[[str], Path]
) -> None:
    folder, tally = tiny_model(name), Tally()
    engine = small_engine(
        folder,
        dtype="float16",
        kernels="triton",
        device=DEVICE.type,
        batch_invariant=batch_invariant,
    )
    assert engine.info.layout.dtype == "float16"
    params = msgspec.structs.replace(GREEDY, max_tokens=NEW_TOKENS)
    actual = generate_ids(engine, PROMPTS, params)
    compare_all(folder, PROMPTS, actual, tally, "float16", new_tokens=NEW_TOKENS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-gqa4", "w4a16 g32 zeros"),
        ("llama-gqa4", "gptq act-order"),
        ("llama-gqa1", "bitsandbytes nf4"),
        ("gpt-oss", "mxfp4"),
    ],
)
def test_ids_of_quantized_models_equal_those_of_transformers(model: str, layout: str) -> None:
    folders, tally = make_quantized(model, layout), Tally()
    engine = small_engine(folders.folder, kernels="triton", device=DEVICE.type)
    params = msgspec.structs.replace(GREEDY, max_tokens=NEW_TOKENS)
    actual = generate_ids(engine, PROMPTS, params)
    compare_all(folders.plain, PROMPTS, actual, tally, layout, new_tokens=NEW_TOKENS)
    tally.check()
