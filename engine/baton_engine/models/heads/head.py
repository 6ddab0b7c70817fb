"""The Protocol of heads with layers, which draft one token after the other.

Shapes: T tokens of a step, C numbers that the target returns of a token, D hidden size of the head,
S rows to sample, V vocabulary of the target.
"""

from __future__ import annotations

from typing import Protocol

import torch

from baton_engine.attention.interface import StepAttention


class Head(Protocol):
    """Its input at a position is what the target computed there, and the token after it. The KV of
    both has the place of that position."""

    def states(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        """What the head takes of the target's hidden states, [T, D]."""
        ...

    def forward(
        self,
        states_TD: torch.Tensor,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Compute the tokens, and write their KV. Returns [T, D], the input of logits(). It takes
        the place of the target's states when the next token is drafted."""
        ...

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Float32 logits [S, V]."""
        ...
