"""Quantized weights in the tensors of compressed-tensors.

pack-quantized has `weight_packed` int32 [O, I / 8], with eight 4-bit codes (or four of 8 bits) of a
row in each number, the first in the lowest bits, and zero points packed in the same way along the
outputs; codes and zero points have an offset, so that they are not negative. int-quantized has
`weight` int8 [O, I]. Both have `weight_scale` [O, G], or one number for the whole weight.

Shapes: O and I a linear's output and input size, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.config.quantization.scheme import BITS, WeightScheme
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.packed_words import unpacked, words_of
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, in_group_order
from baton_engine.layers.quantization.weight_format import WeightFormat

NO_GROUP = -1


class PackQuantized(WeightFormat):
    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        scheme, bits = self._scheme, BITS[self._scheme.numbers]
        group = scheme.group(inputs)
        groups = -(-inputs // group)
        words = slots.tensor(
            f"{name}.weight_packed", outputs, words_of(inputs, bits), dtype=torch.int32
        )
        slots.tensor(f"{name}.weight_shape", 2, dtype=torch.int64)
        scales = _scales(slots, name, scheme, outputs, groups)
        zeros = order = None
        if scheme.shifted:
            rows = words_of(outputs, bits)
            zeros = slots.tensor(f"{name}.weight_zero_point", rows, groups, dtype=torch.int32)
        input_scale = _input_scale(slots, name, scheme)
        if scheme.ordered:
            order = slots.tensor(
                f"{name}.weight_g_idx", inputs, dtype=torch.int32, default=NO_GROUP
            )

        def finish() -> QuantizedWeight:
            codes = words.view(torch.uint8)[:, : -(-inputs * bits // 8)].contiguous()
            if bits == 8:
                codes = codes.sub_(128).view(torch.int8)  # 0 .. 255 means -128 .. 127
            scales_OG = scales.float().expand(outputs, groups).contiguous()
            shifts = None
            if zeros is not None:
                zeros_GO = unpacked(zeros.t(), bits)[:, :outputs]
                shifts = -scales_OG * (zeros_GO.t().float() - (1 << (bits - 1)))
            weight = QuantizedWeight(
                *(scheme.numbers, codes, scales_OG, group, inputs, shifts),
                activations=scheme.activations,
                input_scale=_number(input_scale),
            )
            if order is None or bool((order == NO_GROUP).all()):
                return weight
            return in_group_order(weight, order, f"{name}.weight_g_idx")

        return finish


class IntQuantized(WeightFormat):
    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        scheme = self._scheme
        group = scheme.group(inputs)
        groups = -(-inputs // group)
        codes = slots.tensor(f"{name}.weight", outputs, inputs, dtype=torch.int8)
        scales = _scales(slots, name, scheme, outputs, groups)
        zeros = None
        if scheme.shifted:
            # The first versions leave out zero points that are all 0.
            zeros = slots.tensor(
                f"{name}.weight_zero_point", *scales.shape, dtype=torch.int8, default=0
            )
        input_scale = _input_scale(slots, name, scheme)

        def finish() -> QuantizedWeight:
            scales_OG = scales.float().expand(outputs, groups).contiguous()
            return QuantizedWeight(
                *(scheme.numbers, codes, scales_OG, group, inputs),
                shifts_OG=None if zeros is None else -scales_OG * zeros.float(),
                activations=scheme.activations,
                input_scale=_number(input_scale),
            )

        return finish


def _scales(
    slots: WeightSlots, name: str, scheme: WeightScheme, outputs: int, groups: int
) -> torch.Tensor:
    """Of the checkpoint's dtype at most, so float32 keeps them."""
    shape = (1,) if scheme.outputs is None else (outputs, groups)
    return slots.tensor(f"{name}.weight_scale", *shape, dtype=torch.float32)


def _input_scale(slots: WeightSlots, name: str, scheme: WeightScheme) -> torch.Tensor | None:
    if scheme.activations is None or not scheme.static:
        return None
    return slots.tensor(f"{name}.input_scale", 1, dtype=torch.float32)


def _number(scale: torch.Tensor | None) -> float | None:
    return None if scale is None else float(scale)
