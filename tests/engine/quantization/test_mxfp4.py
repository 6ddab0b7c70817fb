"""Experts in MXFP4 have the numbers that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton_engine.config.families import config_of
from baton_engine.config.quantization.read import KEY, read_quantization
from baton_engine.errors import UnsupportedModel
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.mxfp4 import declare_experts
from baton_engine.layers.quantization.quantized_weight import dequantized
from tests.support.engines.tiny_models import make_tiny_model


def test_numbers_are_those_of_transformers() -> None:
    noise = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 6, 2, 16), generator=noise, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 6, 2), generator=noise, dtype=torch.uint8)
    slots = WeightSlots(torch.float32, torch.device("cpu"))
    finish = declare_experts(slots, "experts.gate_up_proj", 3, 6, 64, in_turn=2)
    slots.parameters["experts.gate_up_proj_blocks"].load(blocks)
    slots.parameters["experts.gate_up_proj_scales"].load(scales)
    expected_EIO = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    gates_then_ups = [0, 2, 4, 1, 3, 5]
    assert torch.equal(dequantized(finish()), expected_EIO.transpose(1, 2)[:, gates_then_ups])


def test_sizes_that_are_no_whole_groups_are_refused() -> None:
    slots = WeightSlots(torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match=r"down_proj_blocks: .* 48 inputs .* of 32"):
        declare_experts(slots, "experts.down_proj", 3, 6, 48)


def test_experts_that_are_not_converted_are_plain() -> None:
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1.mlp"]}
    found = read_quantization({KEY: config})
    assert found is not None
    names = ("0.mlp.experts", "1.mlp.experts", "10.mlp.experts", "0.self_attn.q_proj")
    schemes = [found.scheme_of(f"model.layers.{name}") for name in names]
    assert [scheme is not None for scheme in schemes] == [True, False, True, False]


@pytest.mark.parametrize(("more", "dtype"), [({}, "bfloat16"), ({"dtype": "float16"}, "float16")])
def test_plain_weights_are_bfloat16_unless_the_config_says_another_dtype(
    more: dict[str, str], dtype: str
) -> None:
    config = json.loads((Path(make_tiny_model("gpt-oss")) / "config.json").read_text())
    config = {key: value for key, value in config.items() if "dtype" not in key}
    found = config_of({**config, KEY: {"quant_method": "mxfp4"}, **more}, {}, impl="baton")
    assert found.dtype == dtype
