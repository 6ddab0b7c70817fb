"""Phi-3's config.json. No torch.

A longrope model has two sets of factors. transformers uses the short ones while a sequence has at
most `original_max_position_embeddings` tokens, and then computes all its KV again with the long
ones. Here, as in vLLM, the engine's --max-model-len (by default the model's maximum) chooses one
set for all sequences, so a token's KV depends only on the tokens before it. The choice is in the
fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.dense import Dense
from baton_engine.config.families import Family
from baton_engine.config.layer_counts import DECODER
from baton_engine.config.linear_shapes import Names, decoder_linears
from baton_engine.config.model_config import RopeConfig
from baton_engine.config.rope import check_rotary_dim, rope_settings, rope_type
from baton_engine.config.windows import Windows
from baton_engine.errors import ModelError

# The first releases called longrope "su" or "yarn".
LONGROPE = ("longrope", "su", "yarn")
# The default of Phi-3's config class.
ORIGINAL_MAX_POSITIONS = 4096

# The names of layers in checkpoints.
NAMES = Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def read_rope(values: Mapping[str, Any]) -> RopeConfig:
    settings = rope_settings(values)
    kind = rope_type(settings, ("default", *LONGROPE))
    fields = ConfigFields(settings)
    rope = RopeConfig(
        type="default",
        theta=fields.number("rope_theta", 10000.0),
        partial=fields.number("partial_rotary_factor", 1.0),
    )
    rotary_dim = check_rotary_dim(values, rope)
    if kind not in LONGROPE:
        return rope
    short, long = fields.numbers("short_factor"), fields.numbers("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != rotary_dim // 2:
            raise ModelError(
                f"config.json: {name} has {len(factors)} entries; expected {rotary_dim // 2}"
            )
    # As in transformers, one among the rope settings does not count.
    original = ConfigFields(values).integer(
        "original_max_position_embeddings", ORIGINAL_MAX_POSITIONS
    )
    return RopeConfig(
        type="longrope",
        theta=rope.theta,
        partial=rope.partial,
        short_factors=short,
        long_factors=long,
        original_max_positions=original,
        attention_factor=_attention_factor(settings, values, original),
    )


def _attention_factor(
    settings: Mapping[str, Any], values: Mapping[str, Any], original: int
) -> float:
    """By default it grows with the ratio of the maximum length to the original one."""
    fields = ConfigFields(settings)
    if settings.get("attention_factor") is not None:
        return fields.number("attention_factor")
    longest = ConfigFields(values).integer("max_position_embeddings")
    ratio = fields.number("factor", longest / original)
    if ratio <= 1:
        return 1.0
    if original == 1:
        raise ModelError(
            "config.json: original_max_position_embeddings is 1; expected at least 2, or an "
            "attention_factor"
        )
    return math.sqrt(1 + math.log(ratio) / math.log(original))


DENSE = Dense(
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    default_eps=1e-5,
    windows=Windows("all"),
    rope=read_rope,
    more_keys=frozenset({"original_max_position_embeddings"}),
    more_rope_keys=frozenset({"long_factor", "short_factor"}),
)


FAMILY = Family(
    read=DENSE.read,
    model="baton_engine.models.phi3.model:Phi3",
    examples="Phi-3, Phi-3.5, Phi-4",
    windows="by `sliding_window`, in every layer",
    counts=replace(DECODER, linears=partial(decoder_linears, names=NAMES)),
)
