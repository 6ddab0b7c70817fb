"""Phi-3's model: the checkpoint has q, k and v in one tensor, and gate and up in another."""

from __future__ import annotations

from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.decoder_layers import Attention, GatedMLP, Linear
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder, DecoderLayer


class Phi3Attention(Attention):
    def make_qkv(self, slots: WeightSlots, name: str, config: ModelConfig) -> Linear:
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        return Linear(slots, [f"{name}.qkv_proj"], [rows], config.hidden_size, config.qkv_bias)


class Phi3MLP(GatedMLP):
    def make_gate_up(self, slots: WeightSlots, name: str, config: ModelConfig, size: int) -> Linear:
        return Linear(
            slots, [f"{name}.gate_up_proj"], [2 * size], config.hidden_size, config.mlp_bias
        )


class Phi3Layer(DecoderLayer):
    attention_type = Phi3Attention
    mlp_type = Phi3MLP


class Phi3(Decoder):
    layer_type = Phi3Layer
