"""OLMoE's config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.dense import Dense
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import Family
from baton_engine.config.layer_counts import DECODER
from baton_engine.config.mixture import EXPERT_KEYS, all_layers, read_experts
from baton_engine.config.model_config import ModelConfig


def read_olmoe_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    renormalize = ConfigFields(values).flag("norm_topk_prob", False)
    layers = all_layers(values)
    return read_experts(
        values, layers, alias="num_local_experts", size="intermediate_size", renormalize=renormalize
    )


DENSE = Dense(
    mlp_bias=False,
    default_eps=1e-5,
    experts=read_olmoe_experts,
    more_keys=EXPERT_KEYS | {"clip_qkv"},
)


def read(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    config = DENSE.read(values, generation)
    if values.get("clip_qkv") is None:
        return config
    return replace(config, clip_qkv=ConfigFields(values).number("clip_qkv"))


def weights(config: ModelConfig, layer: int) -> int:
    """The norms of q and k have a weight for each number of all heads."""
    heads = config.num_heads + config.num_kv_heads
    return DECODER.weights(config, layer) + heads * config.head_dim


FAMILY = Family(
    read=read,
    model="baton_engine.models.olmoe.model:Olmoe",
    examples="OLMoE",
    windows="refused",
    counts=replace(DECODER, weights=weights),
)
