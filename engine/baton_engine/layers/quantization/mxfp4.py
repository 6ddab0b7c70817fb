"""Quantized weights of all experts of a layer in the tensors of MXFP4.

The tensor whose name ends with `_blocks` is uint8 [E, O, G, 16], with two 4-bit floats of a row in
each byte, the first in the low half. The one that ends with `_scales` is uint8 [E, O, G]: the
exponents of powers of 2, plus 127. Unlike plain weights of the same experts, rows are outputs.

Shapes: E experts; O and I an expert's output and input size, G groups of 32 inputs, J bytes of a
row's codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.config.quantization.mxfp4 import GROUP
from baton_engine.errors import UnsupportedModel
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight

# 2 ** -7
SMALL = 120


def declare_experts(
    slots: WeightSlots, name: str, experts: int, outputs: int, inputs: int, *, in_turn: int = 1
) -> Callable[[], QuantizedWeight]:
    """Declare the tensors; the result makes the weight [E, O, I] of them. The checkpoint has the
    outputs of `in_turn` parts in turn, and the weight has one part after the other."""
    if inputs % GROUP:
        raise UnsupportedModel(
            f"{name}_blocks: MXFP4 with {inputs} inputs is not supported; supported: multiples of "
            f"{GROUP}"
        )
    groups, octets = inputs // GROUP, GROUP // 2
    codes_EOJ = torch.empty(
        experts, outputs, groups * octets, dtype=torch.uint8, device=slots.device
    )
    exponents_EOG = torch.empty(experts, outputs, groups, dtype=torch.uint8, device=slots.device)
    whole = (experts, outputs, groups)
    parts = (experts, in_turn, outputs // in_turn, groups)
    blocks = codes_EOJ.view(*parts, octets).transpose(1, 2)
    slots.fill(f"{name}_blocks", blocks, (*whole, octets))
    slots.fill(f"{name}_scales", exponents_EOG.view(parts).transpose(1, 2), whole, SMALL)

    def finish() -> QuantizedWeight:
        scales_EOG = exponents_EOG.view(torch.float8_e8m0fnu).float()
        return QuantizedWeight("fp4", codes_EOJ, scales_EOG, GROUP, inputs)

    return finish
