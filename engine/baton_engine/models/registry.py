"""Build the model of a config. Its family names the model class (see `config.families`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton_engine.config.families import find_family
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import UnsupportedModel
from baton_engine.layers.parameter import WeightSlots

if TYPE_CHECKING:
    from baton_engine.models.decoder import Decoder


def build_model(config: ModelConfig, slots: WeightSlots) -> Decoder:
    """Build the model of `config.architecture`; its weights are not filled yet. Raises
    UnsupportedModel for an unknown architecture, and ModelError if the model class of another
    package cannot be imported."""
    family = find_family(config.architecture)
    if family is None:
        raise UnsupportedModel(f"architecture {config.architecture} has no model class")
    model: Decoder = family.model_class()(config, slots)
    return model
