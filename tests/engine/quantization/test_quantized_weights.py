"""Weights of each layout are loaded as the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch

from baton_engine.weights.dummy import fill_slots
from tests.support.engines.quantized.loaded_weights import numbers_of
from tests.support.engines.quantized.quantized_models import LAYOUTS, make_quantized

# Of different experts, latent projections, fused tensors, a tied head, sizes that are no multiple
# of a group.
MODELS = ("mixtral", "qwen2-moe", "deepseek-v2-lite", "phi3-partial-window", "llama-gqa2-tied")
SOME = ("w8a16 zeros", "fp8 block", "gptq zeros", "gptq int8 zeros", "awq", "auto-round awq")
# One of each other family whose experts have tensors of their own.
FAMILIES = (
    *("qwen2", "qwen3-gqa4", "mistral-window", "gemma2", "qwen3-moe-bias-odd", "olmoe"),
    *("glm4-moe", "deepseek-v3"),
)
# NF4 needs whole groups.
CASES = [
    *(
        ("llama-gqa1" if "nf4" in layout else "llama-gqa4", layout)
        for layout, each in LAYOUTS.items()
        if each.config
    ),
    *((model, layout) for model in MODELS for layout in SOME),
    *((model, "gptq zeros") for model in FAMILIES),
    ("qwen2-moe-one-of-7", "gptq"),
    ("llama-gqa2-tied", "gptq mixed"),
    ("llama-gqa2-tied", "gptq act-order"),
    ("gpt-oss", "mxfp4"),
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_weights_are_loaded_as_the_numbers_that_they_stand_for(model: str, layout: str) -> None:
    folders = make_quantized(model, layout)
    loaded, expected = numbers_of(folders.folder), numbers_of(folders.plain)
    assert loaded.shape == expected.shape
    # A shift is rounded apart from its code.
    torch.testing.assert_close(loaded, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dummy_weights_have_a_usual_size(layout: str) -> None:
    folder = make_quantized("llama-gqa1" if "nf4" in layout else "llama-gqa4", layout).folder
    numbers = numbers_of(folder, lambda _, config, slots: fill_slots(slots))
    assert 0.001 < numbers.abs().mean() < 1
