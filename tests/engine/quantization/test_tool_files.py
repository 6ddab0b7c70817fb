"""Layers that the field's own tools quantized have the numbers that these tools read there.

`tests.support.engines.quantized.write_tool_files` wrote the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from baton_engine.config.quantization.read import KEY, read_quantization
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import dequantized
from baton_engine.layers.quantization.weight_format import format_of

FILES = sorted((Path(__file__).parent / "tool_files").glob("*.safetensors"))
EXPECTED = "expected."
# Tools dequantize in 16 bits, some of them with a result in 32.
ROUNDING = {torch.float32: 2**-10, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(str(path), framework="pt") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
        return metadata, {name: file.get_tensor(name) for name in list(file.keys())}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_layers_have_the_numbers_that_the_tool_reads(path: Path) -> None:
    metadata, tensors = read(path)
    config = read_quantization({KEY: metadata["quantization_config"]})
    assert config is not None
    layers = [name.removeprefix(EXPECTED) for name in tensors if name.startswith(EXPECTED)]
    assert layers
    for layer in layers:
        expected = tensors[EXPECTED + layer]
        scheme = config.scheme_of(layer)
        assert scheme is not None
        slots = WeightSlots(torch.float32, torch.device("cpu"))
        finish = format_of(scheme).declare(slots, layer, *expected.shape)
        ours = {name for name in tensors if name.startswith(f"{layer}.")}
        assert ours <= slots.parameters.keys()
        for name, parameter in slots.parameters.items():
            assert parameter.optional or parameter.fits(tensors[name].shape)
            if name in tensors:
                parameter.load(tensors[name])
        weight = finish()
        rounding = ROUNDING[expected.dtype]
        torch.testing.assert_close(dequantized(weight), expected.float(), rtol=rounding, atol=1e-7)
    assert not any(config.scheme_of(name) for name in (*metadata["plain"], "lm_head"))


def test_the_files_are_of_all_tools() -> None:
    tools = {"auto-round", "bitsandbytes", "compressed-tensors", "gptqmodel"}
    assert {tool for tool in tools for path in FILES if path.stem.startswith(tool)} == tools


def test_a_static_scale_of_inputs_is_read() -> None:
    [path] = [path for path in FILES if path.stem == "compressed-tensors-w8a8-static"]
    metadata, tensors = read(path)
    config = read_quantization({KEY: metadata["quantization_config"]})
    assert config is not None
    layer = "model.layers.0.mlp.down_proj"
    scheme = config.scheme_of(layer)
    assert scheme is not None
    slots = WeightSlots(torch.bfloat16, torch.device("cpu"))
    finish = format_of(scheme).declare(slots, layer, *tensors[EXPECTED + layer].shape)
    for name, parameter in slots.parameters.items():
        if name in tensors:
            parameter.load(tensors[name])
    weight = finish()
    assert (weight.activations, weight.input_scale) == ("int8", 1 / 32)
