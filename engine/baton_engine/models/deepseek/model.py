"""DeepSeek's model: latent attention, and shared experts beside those that are chosen."""

from __future__ import annotations

from baton_engine.layers.latent_attention import LatentAttention
from baton_engine.layers.moe import MoE
from baton_engine.models.decoder import Decoder, DecoderLayer


class DeepSeekMoE(MoE):
    shared_name = "shared_experts"


class DeepSeekLayer(DecoderLayer):
    attention_type = LatentAttention
    moe_type = DeepSeekMoE


class DeepSeek(Decoder):
    layer_type = DeepSeekLayer
