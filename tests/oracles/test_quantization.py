"""Numbers of quantized weights (O-QNT). Bytes are in test_memory.py."""

from __future__ import annotations

import pytest
import torch

from baton_engine.config.quantization.online import SCHEMES
from baton_engine.layers.quantization.online import quantized
from baton_engine.layers.quantization.quantized_weight import (
    QuantizedWeight,
    dequantized,
    packed_halves,
)


def test_symmetric_int8_rounds_ties_to_even_O_QNT_2() -> None:
    weight = quantized(torch.tensor([[-1.0, 0.5, 1.0]]), SCHEMES["int8"])
    assert weight.scales_OG.item() == pytest.approx(1 / 127)
    assert weight.codes_OJ.tolist() == [[-127, 64, 127]]
    assert dequantized(weight)[0, 1].item() == pytest.approx(0.503937, abs=5e-7)


def test_a_rounded_number_differs_by_half_a_scale_at_most_O_QNT_2b() -> None:
    plain_OI = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    weight = quantized(plain_OI, SCHEMES["int8"])
    errors_OI = (dequantized(weight) - plain_OI).abs()
    assert (errors_OI <= weight.scales_OG * (0.5 + 1e-4)).all()
    assert errors_OI.max() > 0.4 * weight.scales_OG.min()


def test_the_codes_of_nf4_stand_for_its_levels_O_QNT_3() -> None:
    codes_OI = torch.arange(16, dtype=torch.uint8)[None]
    weight = QuantizedWeight("nf4", packed_halves(codes_OI), torch.ones(1, 1), 16, 16)
    assert [round(number, 4) for number in dequantized(weight)[0].tolist()] == [
        *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
        *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
    ]


def test_the_codes_of_fp8_have_4_bits_of_exponent_and_reach_448_O_QNT_4() -> None:
    codes_OI = torch.arange(256, dtype=torch.uint8)[None].view(torch.float8_e4m3fn)
    numbers = dequantized(QuantizedWeight("fp8", codes_OI, torch.ones(1, 1), 256, 256))[0]
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        if (exponent, mantissa) == (15, 7):
            assert numbers[code].isnan()
            continue
        size = mantissa / 8 + (exponent > 0)
        assert numbers[code].item() == (-1) ** sign * size * 2.0 ** (max(exponent, 1) - 7)
    assert numbers.nan_to_num().max().item() == 448
    largest = quantized(torch.tensor([[3.0, -1.5]]), SCHEMES["fp8"])
    assert largest.codes_OJ.float().tolist() == [[448.0, -224.0]]
