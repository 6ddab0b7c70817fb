"""What heads share that continue the target's normed hidden states, and whose logits are those of
the target's matrix.

Shapes: see `models.heads.head`.
"""

from __future__ import annotations

import torch

from baton_engine.config.head_config import HeadConfig
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.rotary import Rope
from baton_engine.models.decoder import Decoder


class NormedStates:
    def __init__(self, head: HeadConfig, slots: WeightSlots, target: Decoder) -> None:
        self._target = target
        self._rope = Rope(head.layer.rope, head.layer.rope_dim, slots.dtype, slots.device)

    def states(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        return self._target.normed(hidden_TC)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self._target.logits_of_normed(hidden_SD)
