"""What a runner needs of a model: the interface of the decoder and of the bridge.

Shapes: T tokens of the step, D hidden size, S rows to sample, V vocabulary, N numbers of a pooling
model's answer.
"""

from __future__ import annotations

from typing import Protocol

import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.ops import Ops


class Model(Protocol):
    config: ModelConfig
    ops: Ops
    # Identifies the bits of products that depend on no other row of a step; "" if they depend on
    # others.
    bits: str

    def keep_rope(self, positions: int) -> None:
        """Keep the rope tables of positions [0, positions), to which later steps are limited."""
        ...

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute the hidden states [T, D], and write the tokens' KV."""
        ...

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Float32 logits [S, V] of some rows of hidden states."""
        ...

    def answers(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """What a pooling model answers with for some rows of hidden states, float32 [S, N]."""
        ...
