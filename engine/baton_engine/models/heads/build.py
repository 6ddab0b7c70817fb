"""Build the head of a config; its weights are not filled yet."""

from __future__ import annotations

from baton_engine.config.head_config import HeadConfig
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder
from baton_engine.models.heads.eagle import Eagle
from baton_engine.models.heads.eagle3 import Eagle3
from baton_engine.models.heads.head import Head
from baton_engine.models.heads.mtp import MultiTokenPrediction

OWN_EMBEDDING = "embed_tokens.weight"


def build_head(
    head: HeadConfig, slots: WeightSlots, target: Decoder, *, own_embedding: bool
) -> Head:
    """With `own_embedding`, the checkpoint has one that the head uses. Not for Medusa."""
    match head.method:
        case "eagle":
            return Eagle(head, slots, target)
        case "eagle3":
            return Eagle3(head, slots, target, own_embedding=own_embedding)
        case "mtp":
            return MultiTokenPrediction(head, slots, target)
        case "medusa":
            raise AssertionError("Medusa has no layers")
