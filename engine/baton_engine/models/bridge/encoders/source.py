"""transformers' config and class of an encoder, and what only a built model tells of its sizes.

In: an architecture and its config.json. Out: a Source and its Sizes. An encoder is a model that
transformers also has with a head that fills masks: to fill one, a token must see those after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from baton_engine.models.bridge.source import Source, read_values, refused

# The argument of models that can be built with a layer after the hidden states, which no vector
# needs.
POOLER = "add_pooling_layer"
# The end of the names of layers that have a vector per position.
POSITIONS = "position_embeddings"


def find_encoder(architecture: str, values: str) -> Source:
    """The model without a head, or the classifier. `values` is the config.json as JSON. Raises
    UnsupportedModel, or ModelError for values that transformers refuses."""
    config = read_values(architecture, values)
    heads = list(_classes(MODEL_FOR_MASKED_LM_MAPPING, config))
    other = getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False)
    if not heads or other:
        raise refused(architecture, "it is no encoder (AutoModelForMaskedLM), nor does it generate")
    bare = list(_classes(MODEL_MAPPING, config))
    for each in _classes(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, config):
        if each.__name__ == architecture:
            return Source(architecture, config, each)
    if not bare or architecture not in {each.__name__ for each in (*bare, *heads)}:
        raise refused(architecture, "transformers has no class of this name for its model_type")
    return Source(architecture, config, bare[0])


def arguments_of(source: Source) -> Mapping[str, Any]:
    """The arguments with which the model's class makes what a vector needs."""
    known = inspect.signature(source.model_class.__init__).parameters
    return {POOLER: False} if POOLER in known else {}


@dataclass(frozen=True, slots=True)
class Sizes:
    """`weights` counts parameters, `widest` is the largest number of outputs of a product, and
    `positions` the most tokens of a text."""

    weights: int
    widest: int
    positions: int


def sizes_of(source: Source) -> Sizes:
    """Build the model on torch's meta device, without memory. Raises UnsupportedModel."""
    make: Any = source.model_class._from_config
    try:
        with torch.device("meta"):
            module: torch.nn.Module = make(source.config, **arguments_of(source))
    except Exception as error:
        why = f"it cannot be built: {' '.join(str(error).split())}"
        raise refused(source.architecture, why) from error
    linears = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
    if not linears:
        raise refused(source.architecture, "it has no linear layers")
    return Sizes(
        weights=sum(parameter.numel() for parameter in module.parameters()),
        widest=max(part.out_features for part in linears),
        positions=min([source.max_positions, *_position_counts(module)]),
    )


def _position_counts(module: torch.nn.Module) -> Iterator[int]:
    """Positions of each layer that has a vector per position. The positions of RoBERTa's kind begin
    after the one of padding."""
    for name, part in module.named_modules():
        if name.endswith(POSITIONS) and isinstance(part, torch.nn.Embedding):
            first = 0 if part.padding_idx is None else part.padding_idx + 1
            yield part.num_embeddings - first


def _classes(mapping: Any, config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    found = mapping.get(type(config), None)
    for each in found if isinstance(found, tuple) else (found,):
        if each is not None:
            yield each
