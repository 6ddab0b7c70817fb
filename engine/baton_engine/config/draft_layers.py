"""The layers of a checkpoint that only draft tokens (multi-token prediction). No torch.

They follow the model's own layers, and are no part of the model (see `head_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import MOST_LAYERS, ConfigFields

# The keys of config.json for their number; one is the default.
DRAFT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


def draft_tensors(values: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """How the names of their tensors begin (see ModelConfig.unused_tensors), after `num_layers`
    layers of the model. Raises ModelError."""
    fields = ConfigFields(values)
    drafts = max(fields.integer(key, 1, least=0, most=MOST_LAYERS) for key in DRAFT_KEYS)
    layers = range(num_layers, num_layers + drafts)
    return tuple(f"model.layers.{layer}." for layer in layers)
