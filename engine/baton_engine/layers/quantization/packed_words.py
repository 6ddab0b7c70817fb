"""Codes that several tools pack into int32 words, and what they become.

Shapes: O and I a linear's output and input size, G groups of inputs, R rows, W words of a row.
"""

from __future__ import annotations

import torch

from baton_engine.config.quantization.scheme import BITS, WeightScheme
from baton_engine.layers.quantization.quantized_weight import (
    QuantizedWeight,
    packed_halves,
    unpacked_halves,
)

WORD_BITS = 32


def words_of(codes: int, bits: int) -> int:
    """The words that hold so many codes."""
    return -(-codes * bits // WORD_BITS)


def group_of(scheme: WeightScheme, inputs: int) -> int:
    """Inputs per scale of a layer with so many inputs."""
    return min(scheme.inputs or inputs, inputs)


def unpacked(words_RW: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of int32 words, uint8 [R, W * 32 / bits], from the lowest bits on."""
    octets = words_RW.contiguous().view(torch.uint8)
    return octets if bits == 8 else unpacked_halves(octets)


def weight_of(
    scheme: WeightScheme,
    codes_OI: torch.Tensor,
    scales_GO: torch.Tensor,
    zeros_GO: torch.Tensor,
) -> QuantizedWeight:
    """The weight (code - zero) * scale, of uint8 codes and zero points. It needs no shifts if all
    zero points are the middle of the codes, and has none unless the scheme says so."""
    inputs, bits = codes_OI.shape[1], BITS[scheme.numbers]
    middle = 1 << (bits - 1)
    if bits == 4:
        codes_OJ = packed_halves(codes_OI)
    else:
        codes_OJ = codes_OI.contiguous().sub_(middle).view(torch.int8)
    scales_OG = scales_GO.t().contiguous()
    offsets_OG = zeros_GO.t().int() - middle
    shifts = -scales_OG * offsets_OG if scheme.shifted or offsets_OG.any() else None
    return QuantizedWeight(
        scheme.numbers, codes_OJ, scales_OG, group_of(scheme, inputs), inputs, shifts
    )
