"""The estimate of quantized weights is what they take, for every family and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton_engine.config.families import quantized_online, read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.quantization.scheme import ORDER_BYTES, SCALE_BYTES
from baton_engine.layers.experts import Experts, LoadedExperts, QuantizedExperts
from baton_engine.layers.linear_method import LinearMethod, packed_methods
from baton_engine.layers.ops import TorchOps
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, Weight
from baton_engine.memory.estimate import quantized_part, weight_bytes
from baton_engine.models.registry import build_model
from baton_engine.weights.dummy import fill_slots
from baton_engine.weights.loader import load_weights
from baton_protocol.policies import Quantization
from tests.support.engines.demands import demand_of
from tests.support.engines.quantized.gguf_files import make_gguf
from tests.support.engines.quantized.quantized_models import LAYOUTS, make_quantized

LEAST_OUTPUTS = 16  # of a layer


def taken(config: ModelConfig, folder: Path | None = None) -> tuple[int, int]:
    """How many numbers the quantized weights of a loaded model have, and their bytes."""
    weights: list[QuantizedWeight] = []

    class Spy(TorchOps):
        def pack_experts(self, experts: LoadedExperts) -> Experts:
            if isinstance(experts, QuantizedExperts):
                weights.extend((experts.gate_up_EGD, experts.down_EDF))
            return experts

    def method_of(name: str, weight: Weight) -> LinearMethod:
        if isinstance(weight, QuantizedWeight):
            weights.append(weight)
        return packed_methods(name, weight)

    slots = WeightSlots(
        *(torch.float32, torch.device("cpu"), Spy()),
        method_of=method_of,
        quantization=config.quantization,
    )
    build_model(config, slots)
    if folder is None:
        fill_slots(slots)
    else:
        load_weights(folder, config, slots)
    slots.finish()
    sizes = [torch.Size(weight.shape).numel() for weight in weights]
    return sum(sizes), sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        *(("qwen3-gqa2", each) for each in ("fp8", "int8", "int4")),
        *(
            (model, "int4")
            for model in (
                *("llama-gqa1", "phi3", "gemma2", "gpt-oss", "mixtral", "qwen2-moe", "olmoe"),
                *("glm4-moe", "deepseek-v2-lite", "deepseek-v3"),
            )
        ),
    ],
)
def test_weights_that_are_quantized_while_they_are_loaded_take_the_estimated_bytes(
    model: str, quantization: Quantization, tiny_model: Callable[[str], Path]
) -> None:
    config = quantized_online(read_config(tiny_model(model)), quantization)
    assert quantized_part(config) == taken(config)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("model", ["qwen3-gqa2", "llama-gqa2-tied"])
def test_a_model_that_drafts_has_a_head_in_8_bits(
    model: str, quantization: Quantization, tiny_model: Callable[[str], Path]
) -> None:
    config = quantized_online(read_config(tiny_model(model)), quantization, drafts=True)
    assert config.quantization is not None
    head = config.quantization.scheme_of("lm_head")
    assert head is not None
    numbers, size = quantized_part(config)
    if config.tied:  # the embedding stays plain, beside the head
        numbers += config.vocab_size * config.hidden_size
        size += head.weight_bytes(config.vocab_size, config.hidden_size)
    assert (numbers, size) == taken(config)
    assert head.weight_bytes(1, 4) == 4 + SCALE_BYTES


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(
            ("llama-gqa1" if "nf4" in layout else "llama-gqa4", layout)
            for layout, each in LAYOUTS.items()
            if each.config
        ),
        ("mixtral", "w4a16 g32"),
        ("deepseek-v2-lite", "w4a16 g32 zeros"),
        ("gpt-oss", "mxfp4"),
    ],
)
def test_the_weights_of_a_quantized_checkpoint_take_the_estimated_bytes(
    model: str, layout: str
) -> None:
    folder = make_quantized(model, layout).folder
    config = read_config(folder)
    assert config.quantization is not None
    numbers, estimate = quantized_part(config)
    allocated = taken(config, folder)
    assert numbers == allocated[0]
    # Stacked projections of the same order keep it once, and those in the usual order none.
    schemes = [scheme for _, scheme in config.quantization.schemes if scheme is not None]
    slack = ORDER_BYTES / LEAST_OUTPUTS if any(scheme.ordered for scheme in schemes) else 0.0
    assert allocated[1] <= estimate <= allocated[1] + slack * numbers


@pytest.mark.parametrize(
    ("model", "mix"), [("llama-wide", "Q4_K_M"), ("llama-gqa2-tied", "demo"), ("mixtral", "Q4_0")]
)
def test_the_weights_of_a_gguf_file_take_the_estimated_bytes(model: str, mix: str) -> None:
    path = make_gguf(model, mix).folder
    config = read_config(path)
    numbers, size = taken(config, path)
    if not config.tied:  # else the head's weight is the embedding's
        assert config.quantization is not None
        assert config.quantization.embedding is not None
        ends = (config.vocab_size, config.hidden_size)
        numbers += ends[0] * ends[1]
        size += config.quantization.embedding.weight_bytes(*ends)
    assert quantized_part(config) == (numbers, size)


def test_an_8b_model_in_4_bits_takes_a_third_of_bfloat16() -> None:
    plain = demand_of()
    small = replace(plain, config=quantized_online(plain.config, "int4"))
    assert 0.3 < weight_bytes(small) / weight_bytes(plain) < 0.5
