"""GLM-4.5's model: the checkpoint has another name for the shared MLP."""

from __future__ import annotations

from baton_engine.layers.moe import MoE
from baton_engine.models.decoder import Decoder, DecoderLayer


class Glm4MoeMoE(MoE):
    shared_name = "shared_experts"


class Glm4MoeLayer(DecoderLayer):
    moe_type = Glm4MoeMoE


class Glm4Moe(Decoder):
    layer_type = Glm4MoeLayer
