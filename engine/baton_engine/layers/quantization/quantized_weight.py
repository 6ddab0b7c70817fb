"""The weight of a linear layer as codes with scales: the one form that all layouts of checkpoints
take once they are loaded, and that kernels read.

Shapes: E experts, if there are several weights; O and I a linear's output and input size, G groups
of inputs, J bytes of a row's codes; T rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from baton_engine.attention.exact.row_rule import Product
from baton_engine.config.quantization.scheme import BITS, Numbers
from baton_engine.errors import WeightsError

# dequantized() has copies of this many numbers at a time.
NUMBERS_AT_ONCE = 1 << 20
# The numbers of 4-bit codes. int4 has an offset of 8.
TABLES: Mapping[Numbers, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "fp4": (
        *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
        *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    ),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [O, I], or [E, O, I]: number(code) * scale, plus a shift if there are shifts.

    4-bit codes are uint8 with two of a row in each byte, the first in the low half, and stand for
    TABLES; int8 codes are int8 and fp8 codes float8_e4m3fn. Scales and shifts belong to `group`
    successive inputs of a row, of which the last group may have fewer. If there is an order, the
    weight's input i is number `order_I[i]` of the layer's inputs.

    With `activations`, the layer's inputs are rounded to these numbers first: by the scale of a
    row's largest, or by `input_scale`.
    """

    numbers: Numbers
    codes_OJ: torch.Tensor
    scales_OG: torch.Tensor  # float32
    group: int
    inputs: int
    shifts_OG: torch.Tensor | None = None  # float32
    order_I: torch.Tensor | None = None  # int64
    activations: Numbers | None = None
    input_scale: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes_OJ.shape[:-1], self.inputs)

    @property
    def kind(self) -> str:
        """Weights of the same kind and shape have the same arithmetic."""
        shifted, ordered = self.shifts_OG is not None, self.order_I is not None
        return f"{self.numbers} by {self.group} {shifted} {ordered} {self.activations}"

    @property
    def nbytes(self) -> int:
        tensors = (self.codes_OJ, self.scales_OG, self.shifts_OG, self.order_I)
        return sum(each.nbytes for each in tensors if each is not None)

    def one(self, expert: int) -> QuantizedWeight:
        """The weight [O, I] of one expert."""
        return replace(
            self,
            codes_OJ=self.codes_OJ[expert],
            scales_OG=self.scales_OG[expert],
            shifts_OG=None if self.shifts_OG is None else self.shifts_OG[expert],
        )

    def outputs(self, order_O: torch.Tensor) -> QuantizedWeight:
        """The weight with its outputs in another order."""
        order_O = order_O.to(self.codes_OJ.device)
        codes = self.codes_OJ.view(torch.uint8)[order_O].view(self.codes_OJ.dtype)
        shifts = None if self.shifts_OG is None else self.shifts_OG[order_O]
        return replace(self, codes_OJ=codes, scales_OG=self.scales_OG[order_O], shifts_OG=shifts)


# The weight of a layer, as it is multiplied.
Weight = torch.Tensor | QuantizedWeight


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the outputs of all, one after the other; None if they differ in more than
    their outputs."""
    first = weights[0]
    if len(weights) == 1:
        return first
    alike = {(each.kind, each.inputs, each.input_scale) for each in weights}
    if len(alike) > 1 or not all(_same_order(first, each) for each in weights):
        return None
    codes = torch.cat([each.codes_OJ.view(torch.uint8) for each in weights], -2)
    return replace(
        first,
        codes_OJ=codes.view(first.codes_OJ.dtype),
        scales_OG=torch.cat([each.scales_OG for each in weights], -2),
        shifts_OG=(
            None
            if first.shifts_OG is None
            else torch.cat([each.shifts_OG for each in weights if each.shifts_OG is not None], -2)
        ),
    )


def _same_order(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Of two weights of the same kind. Projections of the same input often have the same order."""
    if one.order_I is None or other.order_I is None:
        return True
    return torch.equal(one.order_I, other.order_I)


def in_group_order(weight: QuantizedWeight, group_of_I: torch.Tensor, name: str) -> QuantizedWeight:
    """The weight with its inputs in the order of their groups, by the group of each input, which
    the tensor `name` has. Raises WeightsError unless each group has `group` inputs."""
    order_I = group_of_I.long().argsort(stable=True)
    places_I = torch.arange(weight.inputs, device=order_I.device)
    if not torch.equal(group_of_I.long()[order_I], places_I // weight.group):
        raise WeightsError(
            f"{name} says to which group each of {weight.inputs} inputs belongs, and not all "
            f"groups have {weight.group} of them"
        )
    if torch.equal(order_I, places_I):
        return weight
    codes_OJ = weight.codes_OJ
    if BITS[weight.numbers] == 4:
        codes_OJ = packed_halves(unpacked_halves(codes_OJ)[..., order_I])
    else:
        codes_OJ = codes_OJ.view(torch.uint8)[..., order_I].view(codes_OJ.dtype)
    return replace(weight, codes_OJ=codes_OJ, order_I=order_I)


def unpacked_halves(codes_OJ: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes in bytes, uint8, from the low half of each on."""
    return torch.stack((codes_OJ & 15, codes_OJ >> 4), -1).flatten(-2)


def packed_halves(codes_OI: torch.Tensor) -> torch.Tensor:
    """Bytes with two 4-bit codes each, the inverse of unpacked_halves(). The code 0 completes the
    last byte."""
    codes_OI = F.pad(codes_OI, (0, codes_OI.shape[-1] % 2))
    return codes_OI[..., ::2] | codes_OI[..., 1::2] << 4


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The weights of all experts, [E, O, I]; None if they differ in more than their numbers."""
    rows = joined(weights)
    if rows is None:
        return None

    def by_expert(rows_OX: torch.Tensor) -> torch.Tensor:
        return rows_OX.view(len(weights), -1, rows_OX.shape[1])

    return replace(
        rows,
        codes_OJ=by_expert(rows.codes_OJ),
        scales_OG=by_expert(rows.scales_OG),
        shifts_OG=None if rows.shifts_OG is None else by_expert(rows.shifts_OG),
    )


def dequantized(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight's numbers, [O, I] or [E, O, I], for inputs in the layer's order; computed in
    float32."""
    device = weight.codes_OJ.device
    whole_OI = torch.empty(weight.shape, dtype=dtype, device=device).view(-1, weight.inputs)
    step = max(1, NUMBERS_AT_ONCE // weight.inputs)
    for begin in range(0, len(whole_OI), step):
        whole_OI[begin : begin + step] = dequantized_rows(weight, slice(begin, begin + step))
    return whole_OI.view(weight.shape)


def dequantized_rows(weight: QuantizedWeight, rows: slice | torch.Tensor) -> torch.Tensor:
    """The numbers [R, I], float32, of these rows of all experts' outputs."""
    weight = replace(
        weight,
        codes_OJ=weight.codes_OJ.flatten(0, -2)[rows],
        scales_OG=weight.scales_OG.flatten(0, -2)[rows],
        shifts_OG=None if weight.shifts_OG is None else weight.shifts_OG.flatten(0, -2)[rows],
    )
    numbers = _numbers(weight)
    numbers = numbers * _per_input(weight, weight.scales_OG)
    if weight.shifts_OG is not None:
        numbers = numbers + _per_input(weight, weight.shifts_OG)
    if weight.order_I is None:
        return numbers
    in_order = torch.empty_like(numbers)
    in_order[..., weight.order_I] = numbers
    return in_order


def rounded_inputs(x_TI: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x as float32, rounded as the weight's `activations` ask."""
    if weight.activations is None:
        return x_TI.float()
    codes_TI, scale_T1 = input_codes(x_TI, weight.activations, weight.input_scale)
    return codes_TI * scale_T1


def input_codes(
    x_TI: torch.Tensor, activations: Numbers, input_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers to which x is rounded, before they are scaled, and the scale [T, 1] of each row,
    both float32."""
    wide_TI = x_TI.float()
    if activations == "int8":
        largest, least, most = 127.0, -128.0, 127.0
    else:
        largest, least, most = 448.0, -448.0, 448.0
    if input_scale is not None:
        scale = torch.full_like(wide_TI[:, :1], input_scale)
    else:
        scale = wide_TI.abs().amax(1, keepdim=True).div_(largest)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes_TI = (wide_TI / scale).clamp(least, most)
    if activations == "int8":
        return codes_TI.round(), scale
    return codes_TI.to(torch.float8_e4m3fn).float(), scale


def quantized_twin(
    weight: QuantizedWeight, bias_O: torch.Tensor | None, dtype: torch.dtype | None = None
) -> Product:
    """The product with the dequantized weight, in float32 and rounded once to `dtype`, by default
    x's. The twin of the kernels."""
    bias = None if bias_O is None else bias_O.float()

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        out_TO = F.linear(rounded_inputs(x_TI, weight), dequantized(weight), bias)
        return out_TO.to(dtype or x_TI.dtype)

    return product


def _numbers(weight: QuantizedWeight) -> torch.Tensor:
    """The numbers of the codes, float32, in the order of the weight."""
    if BITS[weight.numbers] == 8:
        return weight.codes_OJ.float()
    codes_OI = unpacked_halves(weight.codes_OJ)[..., : weight.inputs]
    if weight.numbers == "int4":
        return codes_OI.float() - 8.0  # CUDA graphs cannot record the copy of a table
    table = torch.tensor(TABLES[weight.numbers], device=weight.codes_OJ.device)
    return table[codes_OI.long()]


def _per_input(weight: QuantizedWeight, values_OG: torch.Tensor) -> torch.Tensor:
    return values_OG.repeat_interleave(weight.group, -1)[..., : weight.inputs]
