"""Multi-token prediction: a layer of the target's checkpoint after those of the target.

Source: section 2.2 of "DeepSeek-V3 Technical Report"; GLM-4.5 has the same module. The layer is of
the target's kind. The embedding and the matrix of the logits are the target's; the norm before the
logits is its own, and the next draft gets the normed states.

Shapes: see `models.heads.head`.
"""

from __future__ import annotations

import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.config.head_config import HeadConfig
from baton_engine.layers.decoder_layers import RMSNorm
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder
from baton_engine.models.heads.normed_states import NormedStates
from baton_engine.models.heads.projection import Projection


class MultiTokenPrediction(NormedStates):
    def __init__(self, head: HeadConfig, slots: WeightSlots, target: Decoder) -> None:
        config, name, size = head.layer, head.name, head.layer.hidden_size
        super().__init__(head, slots, target)
        self._token_norm = RMSNorm(slots, f"{name}.enorm", size, config.norm_eps)
        self._state_norm = RMSNorm(slots, f"{name}.hnorm", size, config.norm_eps)
        self._join = Projection(slots, f"{name}.eh_proj", size, 2 * size)
        self._layer = target.layer_type(slots, 0, config, name)
        self._norm = RMSNorm(slots, f"{name}.shared_head.norm", size, config.norm_eps)

    def forward(
        self,
        states_TD: torch.Tensor,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        parts = self._token_norm(self._target.embed(tokens_T)), self._state_norm(states_TD)
        x_TD = self._join(torch.cat(parts, 1))
        delta_TD = self._layer(x_TD, None, self._rope.tables(positions_T), attention)
        return self._norm(x_TD, delta_TD)
