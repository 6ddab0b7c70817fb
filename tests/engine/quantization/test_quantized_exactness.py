"""Greedy ids of quantized models equal those of transformers with the dequantized weights."""

from __future__ import annotations

import pytest

from tests.support.engines.exactness import Tally, compare_all
from tests.support.engines.quantized.quantized_models import ALL_LAYOUTS, make_quantized
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

# Other layouts are read as the same kinds of weights, which test_quantized_weights shows.
EACH_ARITHMETIC = ("w4a16 g32", "w8a16", "gptq zeros", "gptq act-order", "gptq int8 zeros")
MIXES = ("gptq mixed", "fp8 mixed")
PROMPTS = [prompt_of(length, seed=seed) for length in (1, 17, 100) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("llama-gqa4", layout) for layout in EACH_ARITHMETIC),
        *((model, "w4a16 g32") for model in ("qwen3-gqa2", "mixtral", "deepseek-v2-lite")),
        *(("llama-gqa4", layout) for layout in MIXES),
        *((model, "online int4") for model in ("phi3-partial-window", "mixtral")),
        ("deepseek-v2-lite", "online int8"),
        ("qwen2-moe", "awq"),
        ("deepseek-v2-lite", "fp8 block"),
        ("gpt-oss", "mxfp4"),
        ("llama-gqa1", "bitsandbytes nf4"),
        ("llama-gqa4", "modelopt nvfp4"),
    ],
)
def test_ids_equal_those_of_the_dequantized_model(model: str, layout: str) -> None:
    folders, tally = make_quantized(model, layout), Tally()
    engine = small_engine(folders.folder, quantization=ALL_LAYOUTS[layout].quantization)
    compare_all(folders.plain, PROMPTS, generate_ids(engine, PROMPTS), tally, "batch")
    tally.check()


@pytest.mark.parametrize("layout", ["w8a8", "fp8 block", "gptq act-order"])
def test_ids_do_not_depend_on_the_batch(layout: str) -> None:
    engine = small_engine(make_quantized("llama-gqa4", layout).folder)
    alone = [generate_ids(engine, [prompt])[0] for prompt in PROMPTS]
    assert generate_ids(engine, PROMPTS) == alone
