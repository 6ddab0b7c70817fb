"""Greedy ids of quantized models equal those of transformers with the dequantized weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.memory.requirements import layout_of
from tests.support.engines.exactness import Tally, compare_all
from tests.support.engines.quantized.quantized_models import (
    ALL_LAYOUTS,
    WEIGHTS,
    copy_with,
    make_quantized,
)
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


def test_a_checkpoint_for_fp8_kv_has_it_unless_options_say_otherwise(tmp_path: Path) -> None:
    """Its scales of K and V change nothing."""
    plain = make_quantized("llama-gqa4", "w8a8").folder
    tensors, config = load_file(plain / WEIGHTS), json.loads((plain / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([0.01])
    copy_with(plain, tmp_path / "model", tensors)
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    engine = small_engine(tmp_path / "model")
    assert engine.info.layout.dtype == "float8_e4m3fn"
    chosen = small_engine(plain, kv_cache_dtype="fp8")
    assert generate_ids(engine, PROMPTS[2:4]) == generate_ids(chosen, PROMPTS[2:4])
    config, settings = read_config(tmp_path / "model"), TorchSettings(model=plain, dtype="float32")
    assert layout_of(replace(settings, kv_cache_dtype="int8"), config).dtype == "int8"
    assert layout_of(replace(settings, store_codec="int8"), config).dtype == "float32"
    assert layout_of(replace(settings, kv_cache_dtype="float32"), config).dtype == "float32"
