"""transformers' config and class of a model, and the refusal of models that are known not to work.

In: an architecture and its config.json. Out: a Source. Code that a checkpoint brings along never
runs: only transformers' own classes are looked up, and nothing is read but the config's values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from baton_engine.errors import ModelError, UnsupportedModel

# Kinds of layers whose state is KV.
KV_LAYERS = frozenset({"full_attention", "sliding_attention"})
# The names of a model's longest sequence, in the order in which they are asked.
LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
# Ropes whose frequencies depend on the length of the longest sequence of a step. Up to the length
# that the checkpoint was trained for they do not change.
LENGTH_ROPES = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Source:
    """`text` is the part of `config` that describes the language model: most often all of it."""

    architecture: str
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]

    @property
    def text(self) -> PreTrainedConfig:
        return self.config.get_text_config(decoder=True)

    @property
    def version(self) -> str:
        return f"transformers {transformers.__version__}"

    @property
    def tied(self) -> bool:
        return bool(getattr(self.text, "tie_word_embeddings", False))

    @property
    def max_positions(self) -> int:
        """Raises UnsupportedModel for a config that does not name it."""
        named = [getattr(self.text, key, None) for key in LENGTHS]
        length = next((value for value in named if isinstance(value, int) and value > 0), None)
        if length is None:
            raise refused(self.architecture, f"config.json has none of {', '.join(LENGTHS)}")
        return min([length, *_rope_lengths(self.text, length)])


def refused(architecture: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"architecture {architecture} cannot be served by transformers: {why}")


def find_source(architecture: str, values: str) -> Source:
    """`values` is the config.json as JSON. Raises UnsupportedModel, or ModelError for values that
    transformers refuses."""
    config = read_values(architecture, values)
    source = Source(architecture, config, _class_of(architecture, config))
    why = _refusal(source)
    if why:
        raise refused(architecture, why)
    return source


def read_values(architecture: str, values: str) -> PreTrainedConfig:
    """transformers' config of a config.json. Raises as find_source() does."""
    read: dict[str, Any] = json.loads(values, object_hook=_number)
    kind = str(read.get("model_type"))
    if read.pop("auto_map", None) and kind not in CONFIG_MAPPING:
        raise refused(architecture, "its code is in its folder (auto_map), which Baton never runs")
    if kind not in CONFIG_MAPPING:
        raise refused(
            architecture, f"transformers {transformers.__version__} has no model_type {kind!r}"
        )
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(read)
    except Exception as error:
        raise ModelError(f"config.json: transformers refuses it: {_line(error)}") from error
    return config


def _class_of(architecture: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classes = found if isinstance(found, tuple) else (found,)
    for each in classes:
        if each is not None and each.__name__ == architecture:
            model_class: type[PreTrainedModel] = each
            return model_class
    raise refused(architecture, "it is no causal language model (AutoModelForCausalLM)")


def _refusal(source: Source) -> str:
    """Why this model cannot be served; empty if nothing is known against it."""
    config, text = source.config, source.text
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if getattr(text, "add_cross_attention", False):
        return "it has cross attention"
    others = sorted(key for key in config.sub_configs if getattr(config, key) is not text)
    if others:
        return f"it has parts beside the language model: {', '.join(others)}"
    if source.model_class._is_stateful:
        return "it keeps a state that is no KV"
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - KV_LAYERS)
    if kinds:
        return f"layers of the kind {', '.join(map(repr, kinds))} keep a state that is no KV"
    return ""


def _rope_lengths(text: PreTrainedConfig, length: int) -> list[int]:
    """Lengths up to which each rope of the model does not depend on a sequence's length."""
    settings: Any = getattr(text, "rope_parameters", None) or {}
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    return [
        int(
            part.get("original_max_position_embeddings")
            or getattr(text, "original_max_position_embeddings", None)
            or length
        )
        for part in parts
        if part.get("rope_type") in LENGTH_ROPES
    ]


def _number(values: dict[str, Any]) -> Any:
    """transformers writes an infinite number as an object."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _line(error: Exception) -> str:
    """The error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
