"""Quantized weights of 4-bit floats.

The codes are uint8 [O, I / 2], with two of a row in each byte, the first in the low half. The
scales of groups are float8_e4m3fn [O, G], with one more number for the whole weight, by which
compressed-tensors divides and ModelOpt multiplies; or the exponents of powers of 2, plus 127.

Shapes: O and I a linear's output and input size, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.mxfp4 import SMALL
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight
from baton_engine.layers.quantization.weight_format import WeightFormat

USUAL_DIVISOR = 128.0


class Mxfp4(WeightFormat):
    """As compressed-tensors writes MXFP4."""

    codes_name = "weight_packed"
    # Inputs are not rounded.
    input_scale_name = "input_global_scale"

    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        group = self._scheme.group(inputs)
        codes_OJ = slots.tensor(
            f"{name}.{self.codes_name}", outputs, -(-inputs // 2), dtype=torch.uint8
        )
        scales_of = self._scales(slots, name, outputs, -(-inputs // group))
        slots.tensor(f"{name}.{self.input_scale_name}", 1, dtype=torch.float32, default=1)
        return lambda: QuantizedWeight(self._scheme.numbers, codes_OJ, scales_of(), group, inputs)

    def _scales(
        self, slots: WeightSlots, name: str, outputs: int, groups: int
    ) -> Callable[[], torch.Tensor]:
        exponents_OG = slots.tensor(
            f"{name}.weight_scale", outputs, groups, dtype=torch.uint8, usual=SMALL
        )
        return lambda: exponents_OG.view(torch.float8_e8m0fnu).float()


class Nvfp4(Mxfp4):
    """As compressed-tensors writes NVFP4."""

    whole_name = "weight_global_scale"
    divides = True

    def _scales(
        self, slots: WeightSlots, name: str, outputs: int, groups: int
    ) -> Callable[[], torch.Tensor]:
        scales_OG = slots.tensor(f"{name}.weight_scale", outputs, groups, dtype=torch.float8_e4m3fn)
        usual = USUAL_DIVISOR if self.divides else 1 / USUAL_DIVISOR
        whole = slots.tensor(f"{name}.{self.whole_name}", 1, dtype=torch.float32, usual=usual)
        if self.divides:
            return lambda: scales_OG.float() / whole
        return lambda: scales_OG.float() * whole


class ModeloptNvfp4(Nvfp4):
    codes_name = "weight"
    input_scale_name = "input_scale"
    whole_name = "weight_scale_2"
    divides = False
