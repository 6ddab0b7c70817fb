"""Quantized weights in the form that Triton kernels read. Imports no triton.

A step of a kernel has the inputs of two halves, H inputs each. Of 4-bit codes, the bytes of a step
have the first half in their low bits and the second in their high ones: a program multiplies each
half as it is, and never puts codes between one another. Scales are by group, so that neighbours
in memory are those of neighbouring outputs.

A half never has inputs of two groups. If groups are too odd for that, each is padded with inputs
that are 0.

Shapes: E experts, if there are several weights; O and I a weight's output and input size, with
padding; B bytes of a row's codes, G groups of inputs; P padded inputs, in the order of the codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from baton_engine.config.quantization.scheme import BITS, Numbers
from baton_engine.layers.quantization.quantized_weight import (
    NUMBERS_AT_ONCE,
    TABLES,
    QuantizedWeight,
    unpacked_halves,
)

# Inputs of a half. The least is what a tensor core multiplies at once.
HALVES = (64, 32, 16)
# Of inputs.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Kernels read the bits of fp8 and fp4 codes as those of a 16-bit float with a larger bias: their
# numbers are this much smaller. A power of 2, so that scales change exactly.
SMALLER: Mapping[Numbers, float] = {"fp8": 2.0**8, "fp4": 2.0**14}


@dataclass(frozen=True, slots=True)
class Inputs:
    """How a layer's inputs [T, I] become those of a weight, [T, P]. For `activations` and
    `input_scale`, see QuantizedWeight."""

    size: int  # I
    places: int  # P
    # int32: the layer's input of each place, -1 for padding. None if both are the same.
    source_P: torch.Tensor | None
    activations: Numbers | None
    input_scale: float | None
    unit: int | None  # sums of this number of successive places are needed


@dataclass(frozen=True, slots=True)
class TritonWeight:
    """A weight [O, I], or [E, O, I]. `group` is the number of inputs per scale, 0 if an output has
    one scale and no shift."""

    numbers: Numbers
    codes_OB: torch.Tensor  # uint8, or int8
    scales_GO: torch.Tensor  # float32
    shifts_GO: torch.Tensor | None  # float32
    group: int
    half: int
    inputs: Inputs
    tables: Mapping[torch.dtype, torch.Tensor] | None  # numbers by code, if no arithmetic has them

    @property
    def outputs(self) -> int:
        return self.codes_OB.shape[-2]

    @property
    def steps(self) -> int:
        """Of all inputs."""
        return -(-self.inputs.places // (2 * self.half))

    @property
    def nbytes(self) -> int:
        tensors = (self.codes_OB, self.scales_GO, self.shifts_GO)
        return sum(each.nbytes for each in tensors if each is not None)

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "NUMBERS": self.numbers,
            "INPUTS": self.inputs.places,
            "ROWS": self.outputs,
            "ROW_BYTES": self.codes_OB.shape[-1],
            "GROUP": self.group,
            "GROUPS": self.scales_GO.shape[-2],
            "SHIFTED": self.shifts_GO is not None,
            "SCALED": self.inputs.activations is not None,
            "H": self.half,
        }


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """The weights of all experts. `clamp` has alpha and the limit of a clamped gate."""

    gate_up_EGD: TritonWeight
    down_EDF: TritonWeight
    gate_up_bias_EG: torch.Tensor | None
    down_bias_ED: torch.Tensor | None
    clamp: tuple[float, float] | None


def triton_weight(weight: QuantizedWeight) -> TritonWeight:
    """A copy of the weight; 8-bit codes stay where they are, if groups need no padding."""
    groups = weight.scales_OG.shape[-1]
    group, inputs = (weight.group, weight.inputs) if groups > 1 else (0, weight.inputs)
    place_P = _padded_places(group, inputs, weight.codes_OJ.device)
    if place_P is not None:
        group, inputs = -(-group // HALVES[-1]) * HALVES[-1], len(place_P)
    half = _half(group, inputs)
    codes_OB = _codes(weight, place_P, half)
    shifted = weight.shifts_OG is not None
    if shifted and not group:
        group = -(-inputs // (2 * half)) * 2 * half
    unit = half if group % (2 * half) else 2 * half
    return TritonWeight(
        numbers=weight.numbers,
        codes_OB=codes_OB,
        scales_GO=_by_group(weight.scales_OG) * SMALLER.get(weight.numbers, 1.0),
        shifts_GO=None if weight.shifts_OG is None else _by_group(weight.shifts_OG),
        group=group,
        half=half,
        inputs=Inputs(
            size=weight.inputs,
            places=inputs,
            source_P=_source(place_P, weight.order_I),
            activations=weight.activations,
            input_scale=weight.input_scale,
            unit=unit if shifted else None,
        ),
        tables=_tables(weight),
    )


def _padded_places(group: int, inputs: int, device: torch.device) -> torch.Tensor | None:
    """The weight's input of each place, -1 for padding; None if groups need none."""
    if group % HALVES[-1] == 0:
        return None
    padded = -(-group // HALVES[-1]) * HALVES[-1]
    place_P = torch.arange(-(-inputs // group) * padded, device=device)
    within_P = place_P % padded
    input_P = place_P // padded * group + within_P
    return torch.where((within_P < group) & (input_P < inputs), input_P, -1)


def _half(group: int, inputs: int) -> int:
    """The largest half that neither ends within a group nor needs padding at the end of a row, if
    there is one."""
    whole = [half for half in HALVES if group % half == 0]
    return next((half for half in whole if inputs % (2 * half) == 0), whole[-1])


def _source(place_P: torch.Tensor | None, order_I: torch.Tensor | None) -> torch.Tensor | None:
    if place_P is None:
        return None if order_I is None else order_I.int()
    if order_I is None:
        return place_P.int()
    return torch.where(place_P < 0, -1, order_I[place_P.clamp(min=0)]).int()


def _codes(weight: QuantizedWeight, place_P: torch.Tensor | None, half: int) -> torch.Tensor:
    codes_OJ = weight.codes_OJ
    four = BITS[weight.numbers] == 4
    if weight.numbers == "fp8":
        codes_OJ = codes_OJ.view(torch.uint8)
    if not four and place_P is None:
        return codes_OJ.contiguous()
    places = weight.inputs if place_P is None else len(place_P)
    row_bytes = -(-places // (2 * half)) * half if four else places
    rows_OJ = codes_OJ.flatten(0, -2)
    packed_OB = torch.empty(len(rows_OJ), row_bytes, dtype=codes_OJ.dtype, device=codes_OJ.device)
    for some in _parts(len(rows_OJ), places):
        codes_RP = rows_OJ[some]
        if four:
            codes_RP = unpacked_halves(codes_RP)[:, : weight.inputs]
        if place_P is not None:
            codes_RP = torch.where(place_P < 0, 0, codes_RP[:, place_P.clamp(min=0)])
        packed_OB[some] = _in_halves(codes_RP, half) if four else codes_RP
    return packed_OB.view(*codes_OJ.shape[:-1], row_bytes)


def _parts(rows: int, row_numbers: int) -> Iterator[slice]:
    """Rows that are unpacked at a time."""
    step = max(1, NUMBERS_AT_ONCE // row_numbers)
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def _in_halves(codes_RP: torch.Tensor, half: int) -> torch.Tensor:
    """Bytes with a code of the first half of a step in the low bits, and one of the second in the
    high ones. The code 0 completes the last step."""
    codes_RP = F.pad(codes_RP, (0, -codes_RP.shape[1] % (2 * half)))
    low, high = codes_RP.view(len(codes_RP), -1, 2, half).unbind(2)
    return (low | high << 4).flatten(1)


def _by_group(values_OG: torch.Tensor) -> torch.Tensor:
    return values_OG.transpose(-1, -2).contiguous()


def _tables(weight: QuantizedWeight) -> Mapping[torch.dtype, torch.Tensor] | None:
    if weight.numbers != "nf4":
        return None
    table = torch.tensor(TABLES["nf4"], device=weight.codes_OJ.device)
    return {dtype: table.to(dtype) for dtype in DTYPES}
