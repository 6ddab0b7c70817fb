"""EAGLE: one decoder layer, which continues the target's normed hidden states.

Source: "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". The layer has no norm
of its input, because the states are normed already, and there is none after it.

Shapes: see `models.heads.head`.
"""

from __future__ import annotations

import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.config.head_config import HeadConfig
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.decoder_layers import RMSNorm
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder, DecoderLayer
from baton_engine.models.heads.normed_states import NormedStates
from baton_engine.models.heads.projection import Projection


def _as_it_is(x_TD: torch.Tensor, delta_TD: torch.Tensor | None = None) -> torch.Tensor:
    assert delta_TD is None, "the first layer"
    return x_TD


class EagleLayer(DecoderLayer):
    def make_norms(self, slots: WeightSlots, name: str, config: ModelConfig) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self._attention_norm = _as_it_is  # type: ignore[assignment]
        self._mlp_norm = RMSNorm(slots, f"{name}.post_attention_layernorm", size, eps)


class Eagle(NormedStates):
    def __init__(self, head: HeadConfig, slots: WeightSlots, target: Decoder) -> None:
        config = head.layer
        super().__init__(head, slots, target)
        self._join = Projection(slots, "fc", config.hidden_size, 2 * config.hidden_size)
        self._layer = EagleLayer(slots, 0, config, head.name)

    def forward(
        self,
        states_TD: torch.Tensor,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        x_TD = self._join(torch.cat((self._target.embed(tokens_T), states_TD), 1))
        delta_TD = self._layer(x_TD, None, self._rope.tables(positions_T), attention)
        return x_TD + delta_TD
