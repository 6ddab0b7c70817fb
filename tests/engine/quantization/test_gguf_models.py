"""Models in GGUF files: their weights, greedy ids, tokenizer and digests."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines.exactness import Tally, compare_all
from tests.support.engines.quantized.gguf_files import make_gguf
from tests.support.engines.quantized.loaded_weights import numbers_of
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

PROMPTS = [prompt_of(length, seed=seed) for length in (1, 17, 100) for seed in (1, 2)]
IDS = [
    ("llama-gqa1", "Q4_0"),
    ("llama-wide", "Q4_K_M"),
    ("llama-gqa2-tied", "demo"),
    ("llama3-rope", "Q8_0"),
    ("llama-gqa4", "F16"),
    ("qwen2", "Q5_1"),
    ("qwen3-gqa4", "Q5_0"),
    ("mixtral", "Q4_0"),
    ("qwen2-moe", "BF16"),
    ("qwen3-moe", "F16"),
]


@pytest.mark.parametrize(("model", "mix"), IDS)
def test_ids_equal_those_of_the_dequantized_model(model: str, mix: str) -> None:
    made, tally = make_gguf(model, mix), Tally()
    engine = small_engine(made.folder)
    compare_all(made.plain, PROMPTS, generate_ids(engine, PROMPTS), tally, "batch")
    tally.check()


@pytest.mark.parametrize(("model", "mix"), IDS)
def test_weights_are_loaded_as_the_numbers_that_they_stand_for(model: str, mix: str) -> None:
    made = make_gguf(model, mix)
    loaded, expected = numbers_of(made.folder), numbers_of(made.plain)
    assert loaded.shape == expected.shape
    torch.testing.assert_close(loaded, expected, rtol=1e-5, atol=1e-6)
