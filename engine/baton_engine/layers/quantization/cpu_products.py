"""Products with quantized weights on a CPU, by `cpu_kernels.quantized`; elsewhere the twin.

Inputs that a weight asks to be rounded enter the kernel as their codes, and the scale of a row is
multiplied with its sums. Codes of int8 for a weight in int8 stay integers where the CPU multiplies
them; others are exact in bfloat16.

Shapes: T rows, O and I a linear's output and input size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton_engine.attention.exact.row_rule import Product
from baton_engine.config.quantization.scheme import BITS, Numbers
from baton_engine.cpu_kernels.quantized import (
    PackedWeight,
    can_pack,
    can_pack_integers,
    multiply_rows,
    pack_integers,
    pack_weight,
    signed_halves,
)
from baton_engine.cpu_kernels.rounded_rows import int8_rows
from baton_engine.layers.quantization.quantized_weight import (
    TABLES,
    QuantizedWeight,
    input_codes,
    quantized_twin,
    unpacked_halves,
)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether kernels compute products with the weight here."""
    return weight.codes_OJ.device.type == "cpu" and can_pack(weight.group, weight.inputs)


def quantized_product(
    weight: QuantizedWeight, bias_O: torch.Tensor | None, dtype: torch.dtype | None = None
) -> Product:
    """The product, rounded once to `dtype`, by default x's."""
    if not can_multiply(weight):
        return quantized_twin(weight, bias_O, dtype)
    packed, inputs = packed_weight(weight, bias_O), Inputs.of(weight)

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        numbers_TI, factors_T = inputs(x_TI)
        return multiply_rows(numbers_TI, packed, dtype or x_TI.dtype, factors_T)

    return product


@dataclass(frozen=True, slots=True)
class Inputs:
    """How a layer's inputs become a weight's. For the fields, see QuantizedWeight."""

    order_I: torch.Tensor | None
    activations: Numbers | None
    input_scale: float | None
    integers: bool = False

    @classmethod
    def of(cls, weight: QuantizedWeight) -> Inputs:
        return cls(weight.order_I, weight.activations, weight.input_scale, _are_integers(weight))

    def __call__(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The numbers that are multiplied, and the scale of each row's sums, if there are any."""
        if self.order_I is not None:
            x_TI = x_TI[:, self.order_I]
        if self.activations is None:
            return x_TI, None
        if self.integers:
            return int8_rows(x_TI, self.input_scale)
        codes_TI, scale_T1 = input_codes(x_TI, self.activations, self.input_scale)
        return codes_TI.to(x_TI.dtype), scale_T1.flatten()


def _are_integers(weight: QuantizedWeight) -> bool:
    """Whether both the weight and its inputs are integers that kernels multiply as such."""
    return (
        weight.numbers == "int8"
        and weight.activations == "int8"
        and weight.shifts_OG is None
        and can_pack_integers(weight.group, weight.inputs)
    )


def packed_weight(weight: QuantizedWeight, bias_EO: torch.Tensor | None) -> PackedWeight:
    """The weight [O, I] or [E, O, I] in the form of the kernels, with a bias [O] or [E, O]."""
    whole = weight.codes_OJ.dim() == 3
    tensors = (weight.codes_OJ, weight.scales_OG, weight.shifts_OG, bias_EO)
    codes_EOJ, scales_EOG, shifts_EOG, bias_EO = (
        each if each is None or whole else each[None] for each in tensors
    )
    assert codes_EOJ is not None
    assert scales_EOG is not None
    if _are_integers(weight):
        of_expert = codes_EOJ
        return pack_integers(
            *(lambda expert, outputs: of_expert[expert, outputs], scales_EOG, bias_EO),
            *(weight.group, weight.inputs),
        )

    def codes_of(expert: int, outputs: slice) -> torch.Tensor:
        codes_OJ = codes_EOJ[expert, outputs]
        if BITS[weight.numbers] == 4:
            return unpacked_halves(codes_OJ)[:, : weight.inputs]
        return signed_halves(codes_OJ) if weight.numbers == "int8" else codes_OJ.view(torch.uint8)

    return pack_weight(
        *(weight.numbers, codes_of, scales_EOG, shifts_EOG, bias_EO),
        *(TABLES.get(weight.numbers, ()), weight.group, weight.inputs),
    )
