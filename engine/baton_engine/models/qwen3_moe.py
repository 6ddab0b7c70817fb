"""Qwen3-MoE: Qwen3 with experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.dense import Dense
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import Family
from baton_engine.config.mixture import EXPERT_KEYS, STEP_KEYS, read_experts, step_layers
from baton_engine.config.windows import Windows


def read_qwen3_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    renormalize = ConfigFields(values).flag("norm_topk_prob", False)
    return read_experts(
        values,
        step_layers(values),
        count="num_local_experts",
        alias="num_experts",
        renormalize=renormalize,
    )


FAMILY = Family(
    read=Dense(
        mlp_bias=False,
        qk_norm=True,
        default_kv_heads=4,
        windows=Windows("switched_all", 4096),
        experts=read_qwen3_experts,
        more_keys=EXPERT_KEYS | STEP_KEYS,
    ).read,
    model="baton_engine.models.decoder:Decoder",
    examples="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    windows="by `use_sliding_window`, in every layer",
)
