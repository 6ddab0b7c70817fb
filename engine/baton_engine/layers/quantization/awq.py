"""Quantized weights in the tensors of AWQ, version gemm.

`qweight` is int32 [I, O / 8], with eight 4-bit codes of outputs in each word: from the lowest bits
on, those of the outputs 0, 2, 4, 6, 1, 3, 5 and 7. `qzeros` is int32 [G, O / 8], packed in the same
way, and `scales` is [G, O].

Shapes: O and I a linear's output and input size, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from baton_engine.config.quantization.scheme import BITS
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.packed_words import unpacked, weight_of, words_of
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight
from baton_engine.layers.quantization.weight_format import WeightFormat

# The place in a word of each of its outputs.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(WeightFormat):
    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        scheme, bits = self._scheme, BITS[self._scheme.numbers]
        groups = -(-inputs // scheme.group(inputs))
        words = words_of(outputs, bits)
        words_IW = slots.tensor(f"{name}.qweight", inputs, words, dtype=torch.int32)
        zeros_GW = slots.tensor(f"{name}.qzeros", groups, words, dtype=torch.int32)
        scales_GO = slots.tensor(f"{name}.scales", groups, outputs, dtype=torch.float32)

        def finish() -> QuantizedWeight:
            codes_IO = _in_order(words_IW, bits)[:, :outputs]
            if inputs % 2:
                codes_IO = F.pad(codes_IO, (0, 0, 0, 1))
            octets_OJ = (codes_IO[::2] | codes_IO[1::2] << 4).t().contiguous()
            zeros_GO = _in_order(zeros_GW, bits)[:, :outputs]
            return weight_of(scheme, octets_OJ, inputs, scales_GO, zeros_GO)

        return finish


def _in_order(words_RW: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of each row, uint8, in the order of the outputs."""
    codes = unpacked(words_RW, bits).view(len(words_RW), -1, len(PLACES))
    return codes[..., list(PLACES)].flatten(1)
