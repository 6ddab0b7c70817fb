"""An encoder that transformers' code computes: it answers one whole prompt at a time.

In: the ids of a prompt. Out: the numbers of its answer. A prompt is computed alone and without
padding, so its bits depend on no other prompt.

Shapes: T tokens of the prompt, D hidden size, N numbers of the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.bridge.encoders.attention import NAME
from baton_engine.models.bridge.encoders.source import arguments_of, find_encoder
from baton_engine.models.bridge.products import pack_linears
from baton_engine.models.bridge.weights import load_module, random_module

# The argument that tells the first text of a pair from the second.
TYPES = "token_type_ids"
# The length of the prompt that shows whether the model computes the same with Baton's attention and
# products, and how far its numbers may be from those with its own, relative to the largest.
TEST_TOKENS = 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}


class EncoderModel:
    """`bits` identifies what the bits of an answer depend on beside the prompt and the weights.

    Models that do not call attention through transformers' interface keep their own.
    """

    def __init__(self, config: ModelConfig, slots: WeightSlots, module: torch.nn.Module) -> None:
        """Raises WeightsError if the module computes something else with Baton's attention and
        products than with its own, and UnsupportedModel."""
        assert config.bridge is not None
        self.config = config
        self.bits = f"{config.bridge.version} alone"
        computes: Any = module
        self._module = computes
        self._device = slots.device
        known = inspect.signature(module.forward).parameters
        types: int = getattr(computes.config, "type_vocab_size", 0)
        self._has_types = TYPES in known and types > 1
        test = [place % config.vocab_size for place in range(TEST_TOKENS)]
        expected_N = self.answer(test)
        computes.set_attn_implementation(NAME)
        pack_linears(module, slots)
        _check_same(config, expected_N, self.answer(test), slots.dtype)

    @torch.inference_mode()
    def answer(self, tokens: Sequence[int], second_text: int = 0) -> torch.Tensor:
        """The vector of a prompt, or the scores of its classes, float32 [N]. From `second_text` on,
        unless it is 0, the tokens are those of the second text of a pair."""
        tokens_1T = torch.tensor([tokens], device=self._device)
        more = {}
        if self._has_types:
            more[TYPES] = torch.zeros_like(tokens_1T)
            if second_text:
                more[TYPES][:, second_text:] = 1
        result = self._module(input_ids=tokens_1T, **more)
        if self.config.pooling == "classify":
            scores_N: torch.Tensor = result.logits[0]
            return scores_N.float()
        hidden_TD: torch.Tensor = result.last_hidden_state[0].float()
        match self.config.pooled:
            case "mean":
                return hidden_TD.mean(0)
            case "cls":
                return hidden_TD[0]
            case "last":
                return hidden_TD[-1]


def load_encoder(config: ModelConfig, slots: WeightSlots, folder: Path | None) -> EncoderModel:
    """The model with the weights of `folder`, or with random ones without it. Raises
    WeightsError."""
    assert config.bridge is not None
    source = find_encoder(config.architecture, config.bridge.values)
    arguments, place = arguments_of(source), (slots.dtype, slots.device)
    if folder is None:
        return EncoderModel(config, slots, random_module(source, *place, arguments=arguments))

    def of_a_head(name: str) -> bool:
        """A checkpoint may have a head for another task, and a layer after the hidden states."""
        parts = name.removeprefix(f"{source.model_class.base_model_prefix}.").split(".")
        return config.pooling == "embed" and parts[0] not in children

    with torch.device("meta"):
        make: Any = source.model_class._from_config
        children = {name for name, _ in make(source.config, **arguments).named_children()}
    module = load_module(source, folder, *place, arguments=arguments, spare=of_a_head)
    return EncoderModel(config, slots, module)


def _check_same(
    config: ModelConfig, expected_N: torch.Tensor, found_N: torch.Tensor, dtype: torch.dtype
) -> None:
    allowed = TOLERANCE[dtype] * float(expected_N.abs().max())
    if not bool(((expected_N - found_N).abs() <= allowed).all()):
        raise WeightsError(
            f"{config.architecture} answers something else with Baton's attention and products than"
            " with transformers' own; it cannot be served"
        )
