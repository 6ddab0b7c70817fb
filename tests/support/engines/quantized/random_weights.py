"""Quantized weights of random codes, for tests of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from baton_engine.config.quantization.scheme import BITS, Numbers
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight


class Case(NamedTuple):
    """`group` inputs per scale, 0 for all."""

    outputs: int
    inputs: int
    group: int


def random_weight(
    numbers: Numbers, case: Case, *, shifted: bool = False, experts: tuple[int, ...] = ()
) -> QuantizedWeight:
    """Random codes, also the least of each kind; outputs have about the size of inputs."""
    draw = torch.Generator().manual_seed(case.inputs)
    group = case.group or case.inputs
    shape = (*experts, case.outputs, case.inputs * BITS[numbers] // 8 + case.inputs % 2)
    codes = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    size = 4.0
    if BITS[numbers] == 8:
        codes = codes[..., : case.inputs].contiguous()
        size = 64.0
        if numbers == "fp8":
            codes = torch.where(codes & 0x7F == 0x7F, 0, codes)  # no NaN
        codes = codes.view(torch.int8 if numbers == "int8" else torch.float8_e4m3fn)
    scales_shape = (*experts, case.outputs, -(-case.inputs // group))
    scales = torch.rand(scales_shape, generator=draw) / (size * case.inputs**0.5)
    shifts = torch.rand(scales_shape, generator=draw) / case.inputs**0.5 if shifted else None
    return QuantizedWeight(numbers, codes, scales, group, case.inputs, shifts)


def moved(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """The weight on a device."""
    return replace(
        weight,
        codes_OJ=weight.codes_OJ.to(device),
        scales_OG=weight.scales_OG.to(device),
        shifts_OG=None if weight.shifts_OG is None else weight.shifts_OG.to(device),
        order_I=None if weight.order_I is None else weight.order_I.to(device),
    )
