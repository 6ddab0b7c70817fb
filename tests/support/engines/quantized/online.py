"""What --quantization makes of plain weights, written from its definition.

Shapes: O and I a linear's output and input size, G groups of inputs, S inputs of a group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton_engine.config.quantization.online import INT4_GROUP
from baton_protocol.policies import Quantization
from tests.support.engines.quantized.layout import Layout, Quantize

MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "q_a_proj", "q_b_proj", "_with_mqa", ".w1", ".w2", ".w3"),
)


def rounded(weight_OI: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """The float32 numbers [O, I] that the quantized weight stands for."""
    if quantization == "int4":
        parts = torch.split(weight_OI.float(), INT4_GROUP, 1)
        return torch.cat([_four_bits(part_OS) for part_OS in parts], 1)
    largest = weight_OI.float().abs().amax(1, keepdim=True)
    if quantization == "int8":
        scale = largest / 127
        return torch.where(scale > 0, (weight_OI.float() / scale).round() * scale, 0)
    scale = largest / 448
    codes = (weight_OI.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.where(scale > 0, codes.float() * scale, 0)


def _four_bits(part_OS: torch.Tensor) -> torch.Tensor:
    low, high = part_OS.amin(1, keepdim=True), part_OS.amax(1, keepdim=True)
    scale = (high - low) / 15
    steps = torch.where(scale > 0, ((part_OS - low) / scale).round(), 8)
    return (steps - 8) * scale + (low + 8 * scale)


def _layout(quantization: Quantization) -> Layout:
    def quantize(weight_OI: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        return {"weight": weight_OI}, rounded(weight_OI, quantization)

    quantizer: Quantize = quantize
    return Layout({}, quantizer, MODULES, quantization=quantization)


LAYOUTS: Mapping[str, Layout] = {
    "online fp8": _layout("fp8"),
    "online int8": _layout("int8"),
    "online int4": _layout("int4"),
}
