"""Quantized weights of 8-bit floats.

`weight` is float8_e4m3fn [O, I]. There is one scale for the whole weight, or one for each row, or
one for each block of rows and inputs, of which the last ones may be smaller. The scales of inputs
and weights have several names.

Shapes: O and I a linear's output and input size, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight
from baton_engine.layers.quantization.weight_format import WeightFormat


class Fp8(WeightFormat):
    # The first name is that of errors.
    scale_names: tuple[str, ...] = ("weight_scale_inv", "weight_scale")
    input_scale_names: tuple[str, ...] = ("activation_scale", "input_scale")

    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        scheme = self._scheme
        group = scheme.group(inputs)
        groups = -(-inputs // group)
        codes_OI = slots.tensor(f"{name}.weight", outputs, inputs, dtype=torch.float8_e4m3fn)
        shape = (1,) if scheme.outputs is None else (-(-outputs // scheme.outputs), groups)
        scales = _named(slots, name, self.scale_names, *shape)
        input_scale = None
        if scheme.static:
            input_scale = _named(slots, name, self.input_scale_names, 1)

        def finish() -> QuantizedWeight:
            rows = scales
            if scheme.outputs is not None:
                rows = scales.repeat_interleave(scheme.outputs, 0)[:outputs]
            return QuantizedWeight(
                *(scheme.numbers, codes_OI, rows.expand(outputs, groups).contiguous()),
                *(group, inputs),
                activations=scheme.activations,
                input_scale=None if input_scale is None else float(input_scale),
            )

        return finish


class ScaledFp8(Fp8):
    """As compressed-tensors and ModelOpt name the tensors."""

    scale_names = ("weight_scale",)
    input_scale_names = ("input_scale",)


def _named(slots: WeightSlots, layer: str, names: tuple[str, ...], *shape: int) -> torch.Tensor:
    """A float32 tensor that has one of `names`."""
    first, *others = (f"{layer}.{name}" for name in names)
    tensor = slots.tensor(first, *shape, dtype=torch.float32)
    for other in others:
        slots.also_spelled([first], {other: slots.parameters[first]})
    return tensor
