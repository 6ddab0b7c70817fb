"""Codes that several tools pack into int32 words, and what they become.

Shapes: O and I a linear's output and input size, G groups of inputs, J bytes of a row's codes, R
rows, W words of a row.
"""

from __future__ import annotations

import torch

from baton_engine.config.quantization.scheme import BITS, WeightScheme
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, unpacked_halves

WORD_BITS = 32


def words_of(codes: int, bits: int) -> int:
    """The number of words that hold this number of codes."""
    return -(-codes * bits // WORD_BITS)


def octets(words_RW: torch.Tensor, codes: int, bits: int) -> torch.Tensor:
    """The bytes of this number of codes of each row, uint8 [R, J]."""
    return words_RW.contiguous().view(torch.uint8)[:, : -(-codes * bits // 8)].contiguous()


def unpacked(words_RW: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of int32 words, uint8 [R, W * 32 / bits], from the lowest bits on."""
    octets = words_RW.contiguous().view(torch.uint8)
    return octets if bits == 8 else unpacked_halves(octets)


def weight_of(
    scheme: WeightScheme,
    octets_OJ: torch.Tensor,
    inputs: int,
    scales_GO: torch.Tensor,
    zeros_GO: torch.Tensor,
) -> QuantizedWeight:
    """The weight (code - zero) * scale, of zero points in uint8 and codes in the bytes of each row,
    from the lowest bits on. It needs no shifts if all zero points are the middle of the codes, and
    has none then, unless the scheme says so. May overwrite the codes."""
    bits = BITS[scheme.numbers]
    middle = 1 << (bits - 1)
    codes_OJ = octets_OJ if bits == 4 else octets_OJ.sub_(middle).view(torch.int8)
    scales_OG = scales_GO.t().contiguous()
    offsets_OG = zeros_GO.t().int() - middle
    shifts = -scales_OG * offsets_OG if scheme.shifted or offsets_OG.any() else None
    return QuantizedWeight(
        scheme.numbers, codes_OJ, scales_OG, scheme.group(inputs), inputs, shifts
    )
