"""Architecture name -> model class. The names are the `architectures` entries of config.json."""

from __future__ import annotations

from collections.abc import Mapping

from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import UnsupportedModel
from baton_engine.layers.decoder_layers import QKNormAttention
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder


class Qwen3(Decoder):
    attention_type = QKNormAttention


MODELS: Mapping[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Qwen3,
}


def build_model(config: ModelConfig, slots: WeightSlots) -> Decoder:
    """Build the model of `config.architecture`; its weights are not filled yet. Raises
    UnsupportedModel for an unknown architecture."""
    model = MODELS.get(config.architecture)
    if model is None:
        raise UnsupportedModel(f"architecture {config.architecture} has no model class")
    return model(config, slots)
