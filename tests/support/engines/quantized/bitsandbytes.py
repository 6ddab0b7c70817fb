"""Weights as bitsandbytes writes them.

Shapes: O and I a linear's output and input size, B blocks of 64 numbers, N of 256 blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.engines.quantized.layout import Layout, Quantize

# The numbers of NF4 in single precision.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)


def int8(weight_OI: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    largest_O = weight_OI.abs().amax(1)
    codes_OI = (weight_OI * (127 / largest_O[:, None])).round()
    tensors = {
        "weight": codes_OI.to(torch.int8),
        "SCB": largest_O,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes_OI * (largest_O[:, None] / 127)


def nf4(*, double: bool) -> Quantize:
    def quantize(weight_OI: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        blocks = weight_OI.reshape(-1, 64)
        largest_B = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [*weight_OI.shape]}
        tensors = {"weight.absmax": largest_B, "weight.quant_map": NF4.clone()}
        if double:
            offset = float(largest_B.mean())
            map_256 = torch.linspace(-1, 1, 256)
            rest_N = F.pad(largest_B - offset, (0, -len(largest_B) % 256)).view(-1, 256)
            nested_N = rest_N.abs().amax(1).clamp(min=1e-6)
            codes = (rest_N / nested_N[:, None] * 127.5 + 127.5).round().to(torch.uint8)
            largest_B = (map_256[codes.long()] * nested_N[:, None]).flatten()[: len(blocks)]
            largest_B = largest_B + offset
            tensors["weight.absmax"] = codes.flatten()[: len(blocks)]
            tensors |= {"weight.nested_absmax": nested_N, "weight.nested_quant_map": map_256}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = (blocks / largest_B[:, None])[..., None].sub(NF4).abs().argmin(-1)
        pairs = codes.to(torch.uint8).view(-1, 2)
        tensors["weight"] = pairs[:, :1] << 4 | pairs[:, 1:]
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text)).to(torch.uint8)
        return tensors, (NF4[codes] * largest_B[:, None]).view(weight_OI.shape)

    return quantize


def _config(**more: Any) -> Mapping[str, Any]:
    """As transformers writes it."""
    in_4_bits = "bnb_4bit_quant_type" in more
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": in_4_bits,
        "_load_in_8bit": not in_4_bits,
        "load_in_4bit": in_4_bits,
        "load_in_8bit": not in_4_bits,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        **more,
    }


LAYOUTS: Mapping[str, Layout] = {
    "bitsandbytes int8": Layout(_config(), int8),
    "bitsandbytes nf4": Layout(
        _config(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False), nf4(double=False)
    ),
    "bitsandbytes nf4 double": Layout(
        _config(
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            llm_int8_skip_modules=["lm_head", "v_proj", "model.layers.1.mlp"],
        ),
        nf4(double=True),
        others=dict.fromkeys(("v_proj", ".1.mlp.up_proj", ".1.mlp.gate_proj", ".1.mlp.down_proj")),
    ),
}
