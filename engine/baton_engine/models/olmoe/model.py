"""OLMoE's model: RMSNorm of q and of k, each over all its heads, and bounds of q, k and v.

Shapes: T tokens of the step, Q numbers of all query heads, K numbers of all kv heads.
"""

from __future__ import annotations

import torch

from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.decoder_layers import Attention, RMSNorm
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder, DecoderLayer


class OlmoeAttention(Attention):
    def __init__(self, slots: WeightSlots, name: str, layer: int, config: ModelConfig) -> None:
        super().__init__(slots, name, layer, config)
        queries, keys = (
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
        )
        self._q_norm = RMSNorm(slots, f"{name}.q_norm", queries, config.norm_eps)
        self._k_norm = RMSNorm(slots, f"{name}.k_norm", keys, config.norm_eps)
        self._sizes = [queries, keys, keys]
        self._bound = config.clip_qkv

    def project(self, x_TD: torch.Tensor) -> torch.Tensor:
        q_TQ, k_TK, v_TK = torch.split(super().project(x_TD), self._sizes, dim=-1)
        q_TQ, k_TK = self._q_norm(q_TQ.contiguous()), self._k_norm(k_TK.contiguous())
        qkv = torch.cat([q_TQ, k_TK, v_TK], -1)
        return qkv if self._bound is None else qkv.clamp_(-self._bound, self._bound)


class OlmoeLayer(DecoderLayer):
    attention_type = OlmoeAttention


class Olmoe(Decoder):
    layer_type = OlmoeLayer
