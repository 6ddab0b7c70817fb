"""Qwen3's model: RMSNorm of each head of q and k before rope.

Shapes: N query heads, K kv heads, X = N + K, H head_dim.
"""

from __future__ import annotations

import torch

from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.decoder_layers import Attention
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.rotary import HeadNorm
from baton_engine.models.decoder import Decoder, DecoderLayer


class Qwen3Attention(Attention):
    """The norms of q and k are computed as one norm with a weight per head."""

    def __init__(self, slots: WeightSlots, name: str, layer: int, config: ModelConfig) -> None:
        super().__init__(slots, name, layer, config)
        q_weight_H = slots.tensor(f"{name}.q_norm.weight", config.head_dim)
        k_weight_H = slots.tensor(f"{name}.k_norm.weight", config.head_dim)
        slots.when_filled(lambda: self._join(q_weight_H, k_weight_H, config.norm_eps))

    def _join(self, q_weight_H: torch.Tensor, k_weight_H: torch.Tensor, eps: float) -> None:
        n, k, _ = self._heads
        weight_XH = torch.cat([q_weight_H.expand(n, -1), k_weight_H.expand(k, -1)])
        self._norm = HeadNorm(weight_XH, eps)


class Qwen3Layer(DecoderLayer):
    attention_type = Qwen3Attention


class Qwen3(Decoder):
    layer_type = Qwen3Layer
