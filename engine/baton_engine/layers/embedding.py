"""The embedding of tokens: rows of a plain weight, or of a quantized one, whose rows become numbers
when they are looked up.

Shapes: T tokens of the step, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import (
    QuantizedWeight,
    Weight,
    dequantized_rows,
)
from baton_engine.layers.quantization.weight_format import format_of


class Embedding:
    def __init__(self, slots: WeightSlots, name: str, vocab: int, hidden: int) -> None:
        """`name` is the layer's in checkpoints."""
        self.weight: Weight
        self._dtype = slots.dtype
        scheme = slots.embedding_scheme
        if scheme is None:
            self.weight = slots.tensor(f"{name}.weight", vocab, hidden)
            return
        finish = format_of(scheme).declare(slots, name, vocab, hidden)
        slots.when_filled(lambda: self._take(finish))

    def _take(self, finish: Callable[[], QuantizedWeight]) -> None:
        self.weight = finish()

    def __call__(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, D] in the compute dtype."""
        if isinstance(self.weight, QuantizedWeight):
            return dequantized_rows(self.weight, tokens_T).to(self._dtype)
        return F.embedding(tokens_T, self.weight)
