"""Gemma 2's model: norms before and after attention and MLP.

Its checkpoints store the weight of a norm minus 1. Embeddings are scaled, and logits soft-capped,
by the common decoder.

Shapes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.decoder_layers import RMSNorm
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.rotary import RopeTables
from baton_engine.models.decoder import Decoder, DecoderLayer


class Gemma2Norm(RMSNorm):
    """The weight is in float32, because bf16 would round 1 + weight."""

    def make_weight(self, slots: WeightSlots, name: str, size: int) -> torch.Tensor:
        return slots.tensor(name, size, dtype=torch.float32, offset=1.0)


class Gemma2Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def make_norms(self, slots: WeightSlots, name: str, config: ModelConfig) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self._attention_norm = Gemma2Norm(slots, f"{name}.input_layernorm", size, eps)
        self._after_attention = Gemma2Norm(slots, f"{name}.post_attention_layernorm", size, eps)
        self._mlp_norm = Gemma2Norm(slots, f"{name}.pre_feedforward_layernorm", size, eps)
        self._after_mlp = Gemma2Norm(slots, f"{name}.post_feedforward_layernorm", size, eps)

    def __call__(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        rope: RopeTables,
        attention: StepAttention,
    ) -> torch.Tensor:
        delta_TD = self._attention(self._attention_norm(x_TD, delta_TD), rope, attention)
        delta_TD = self._mlp(self._mlp_norm(x_TD, self._after_attention(delta_TD)))
        return self._after_mlp(delta_TD)


class Gemma2(Decoder):
    layer_type = Gemma2Layer
    norm_type = Gemma2Norm
