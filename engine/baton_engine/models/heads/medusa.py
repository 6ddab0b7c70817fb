"""Medusa: heads that draft the tokens after the next one from one hidden state, all at once.

Source: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Head i
drafts the token i + 1 after the next: x + silu(linear(x)) in each block, then a product with the
vocabulary.

Shapes: S rows, C numbers that the target returns of a token, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton_engine.attention.exact.row_rule import Product
from baton_engine.config.head_config import HeadConfig
from baton_engine.layers.linear_method import HEAD
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder
from baton_engine.models.heads.projection import Projection


class Medusa:
    def __init__(self, head: HeadConfig, slots: WeightSlots, target: Decoder) -> None:
        size = target.config.hidden_size
        self._target = target
        self._blocks = [
            [
                Projection(slots, f"{number}.{block}.linear", size, size)
                for block in range(head.blocks)
            ]
            for number in range(head.heads)
        ]
        weights = [
            slots.tensor(f"{number}.{head.blocks}.weight", head.vocab_size, size)
            for number in range(head.heads)
        ]
        self._products: list[Product] = []

        def pack() -> None:
            self._products = [slots.product(HEAD, weight_VD) for weight_VD in weights]
            weights.clear()

        slots.when_filled(pack)

    def states(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """What the heads take of the target's hidden states, [S, D]."""
        return self._target.normed(hidden_SC)

    def logits(self, states_SD: torch.Tensor, head: int) -> torch.Tensor:
        """Float32 logits [S, V] of one head."""
        for block in self._blocks[head]:
            states_SD = states_SD + F.silu(block(states_SD))
        return self._products[head](states_SD)
