"""Quantized weights in the tensors of GPTQ.

`qweight` is int32 [I / 8, O], with eight 4-bit codes (or four of 8 bits) of successive inputs in
each word, the first in the lowest bits. `qzeros` is int32 [G, O / 8], packed in the same way along
the outputs, and `scales` is [G, O]. `g_idx` is int32 [I], the group of each input. In the first
version, `qzeros` has each zero point minus one; a zero point of 0 borrows from the next.

Shapes: O and I a linear's output and input size, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.config.quantization.scheme import BITS
from baton_engine.errors import WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.packed_words import (
    WORD_BITS,
    octets,
    unpacked,
    weight_of,
    words_of,
)
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, in_group_order
from baton_engine.layers.quantization.weight_format import WeightFormat

NO_GROUP = -1


class Gptq(WeightFormat):
    # What a stored zero point lacks.
    lacks = 1

    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        scheme, bits = self._scheme, BITS[self._scheme.numbers]
        groups = -(-inputs // scheme.group(inputs))
        words_WO = slots.tensor(
            f"{name}.qweight", words_of(inputs, bits), outputs, dtype=torch.int32
        )
        middle = 1 << (bits - 1)
        zeros = slots.tensor(
            f"{name}.qzeros",
            groups,
            words_of(outputs, bits),
            dtype=torch.int32,
            default=None if scheme.shifted else _signed((middle - self.lacks) * _ones(bits)),
        )
        scales_GO = slots.tensor(f"{name}.scales", groups, outputs, dtype=torch.float32)
        groups_I = slots.tensor(f"{name}.g_idx", inputs, dtype=torch.int32, default=NO_GROUP)

        def finish() -> QuantizedWeight:
            octets_OJ = octets(words_WO.t(), inputs, bits)
            zeros_GO = self._zeros(zeros, name, outputs)
            weight = weight_of(scheme, octets_OJ, inputs, scales_GO, zeros_GO)
            in_files_order = bool((groups_I == NO_GROUP).all())
            return weight if in_files_order else in_group_order(weight, groups_I, f"{name}.g_idx")

        return finish

    def _zeros(self, words: torch.Tensor, name: str, outputs: int) -> torch.Tensor:
        """The zero points, uint8 [G, O]. Those of a symmetric weight are the middle of the codes,
        and files do not always say truly whether they lack one."""
        bits = BITS[self._scheme.numbers]
        if self._scheme.shifted:
            return unpacked(words + self.lacks * _ones(bits), bits)[:, :outputs]
        zeros_GO = unpacked(words, bits)[:, :outputs]
        middle = 1 << (bits - 1)
        if not any(bool((zeros_GO == each).all()) for each in (middle, middle - 1)):
            raise WeightsError(
                f"{name}.qzeros has other zero points than the middle of the codes, although "
                "quantization_config has sym true"
            )
        return torch.full_like(zeros_GO, middle)


class GptqV2(Gptq):
    lacks = 0


def _ones(bits: int) -> int:
    """The word of which each code is 1."""
    return sum(1 << place for place in range(0, WORD_BITS, bits))


def _signed(word: int) -> int:
    return word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word
