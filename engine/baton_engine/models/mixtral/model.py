"""Mixtral's model: the checkpoint has other names for the parts of experts."""

from __future__ import annotations

from baton_engine.layers.moe import MoE
from baton_engine.models.decoder import Decoder, DecoderLayer


class MixtralMoE(MoE):
    expert_parts = ("w1", "w3", "w2")

    def rename(self, name: str) -> str:
        return f"{name.removesuffix('.mlp')}.block_sparse_moe"


class MixtralLayer(DecoderLayer):
    moe_type = MixtralMoE


class Mixtral(Decoder):
    layer_type = MixtralLayer
