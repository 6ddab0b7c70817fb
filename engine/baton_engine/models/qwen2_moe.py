"""Qwen2-MoE: Qwen2 with experts, and an MLP with a gate that every token shares. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.dense import Dense
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import Family
from baton_engine.config.mixture import EXPERT_KEYS, STEP_KEYS, read_experts, step_layers
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.windows import Windows


def read_qwen2_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    fields = ConfigFields(values)
    return read_experts(
        values,
        step_layers(values),
        renormalize=fields.flag("norm_topk_prob", False),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


DENSE = Dense(
    output_bias=False,
    mlp_bias=False,
    default_kv_heads=16,
    windows=Windows("switched_alternating", 4096),
    experts=read_qwen2_experts,
    more_keys=EXPERT_KEYS | STEP_KEYS | {"qkv_bias", "shared_expert_intermediate_size"},
)


def read(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    qkv_bias = ConfigFields(values).flag("qkv_bias", True)
    return replace(DENSE.read(values, generation), qkv_bias=qkv_bias)


FAMILY = Family(
    read=read,
    model="baton_engine.models.decoder:Decoder",
    examples="Qwen1.5-MoE, Qwen2-57B-A14B",
    windows="by `use_sliding_window`",
)
