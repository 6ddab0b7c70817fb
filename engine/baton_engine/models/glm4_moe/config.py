"""GLM-4.5's config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.dense import Dense
from baton_engine.config.draft_layers import DRAFT_KEYS, draft_tensors
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import Family
from baton_engine.config.layer_counts import DECODER
from baton_engine.config.linear_shapes import Names, decoder_linears
from baton_engine.config.mixture import EXPERT_KEYS, GROUP_KEYS, read_grouped_experts
from baton_engine.config.model_config import ModelConfig, RopeConfig
from baton_engine.config.rope import read_partial_rope

# The names of layers in checkpoints.
NAMES = Names(shared="shared_experts")


def read_glm_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    return read_grouped_experts(values, first=1, scale=1.0, groups=1, top_groups=1)


def read_glm_rope(values: Mapping[str, Any]) -> RopeConfig:
    return read_partial_rope(values, 0.5)


DENSE = Dense(
    output_bias=False,
    mlp_bias=False,
    default_kv_heads=8,
    default_eps=1e-5,
    rope=read_glm_rope,
    experts=read_glm_experts,
    more_keys=EXPERT_KEYS | GROUP_KEYS | {*DRAFT_KEYS, "use_qk_norm"},
)


def read(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    fields, config = ConfigFields(values), DENSE.read(values, generation)
    return replace(
        config,
        qk_norm=fields.flag("use_qk_norm", False),
        unused_tensors=draft_tensors(values, config.num_layers),
    )


FAMILY = Family(
    read=read,
    model="baton_engine.models.glm4_moe.model:Glm4Moe",
    examples="GLM-4.5, GLM-4.6",
    windows="refused",
    counts=replace(DECODER, linears=partial(decoder_linears, names=NAMES)),
)
