"""The config.json of DeepSeek V2 and V3. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.config.config_json import ConfigFields, shown
from baton_engine.config.dense import Dense
from baton_engine.config.draft_layers import DRAFT_KEYS, draft_tensors
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import Family
from baton_engine.config.latent import LatentConfig
from baton_engine.config.mixture import (
    EXPERT_KEYS,
    GROUP_KEYS,
    later_layers,
    read_experts,
    read_grouped_experts,
)
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.rope import ROPE_TYPES, rope_settings, rope_type, yarn_scale
from baton_engine.errors import ModelError, UnsupportedModel
from baton_engine.models.deepseek.counts import LATENT_COUNTS

MODEL = "baton_engine.models.deepseek.model:DeepSeek"
KEYS = (
    EXPERT_KEYS
    | GROUP_KEYS
    | {
        *DRAFT_KEYS,
        "topk_method",
        *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("rope_interleave", "qk_head_dim"),
    }
)
# How V2 chooses experts, by the name in config.json: from all, or from the best groups.
V2_METHODS = ("greedy", "group_limited_greedy")


def read_v2_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    fields = ConfigFields(values)
    method = values.get("topk_method", "greedy")
    if method not in V2_METHODS:
        raise UnsupportedModel(
            f"topk_method {shown(method)} is not supported; supported: {', '.join(V2_METHODS)}"
        )
    grouped = method != "greedy"
    return read_experts(
        values,
        later_layers(values, 0),
        count="n_routed_experts",
        alias="num_experts",
        renormalize=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group") if grouped else 1,
        top_groups=fields.integer("topk_group") if grouped else 1,
        shared_size=fields.integer("n_shared_experts", 2) * fields.integer("moe_intermediate_size"),
        float32_router=True,
    )


def read_v3_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    return read_grouped_experts(values, first=3, scale=2.5, groups=8, top_groups=4)


V2 = Dense(whole_heads=True, experts=read_v2_experts, more_keys=frozenset(KEYS))
V3 = Dense(experts=read_v3_experts, mlp_bias=False, more_keys=frozenset(KEYS))


def read_v2(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    return _with_latent(V2.read(values, generation), values, pairs=True)


def read_v3(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    config = V3.read(values, generation)
    unused = draft_tensors(values, config.num_layers)
    pairs = ConfigFields(values).flag("rope_interleave", True)
    return replace(_with_latent(config, values, pairs=pairs), unused_tensors=unused)


def _with_latent(config: ModelConfig, values: Mapping[str, Any], *, pairs: bool) -> ModelConfig:
    """Attention computes with the latent rows: they are the keys of all query heads, and their
    first numbers the values."""
    fields = ConfigFields(values)
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank", 512),
        rope_dim=fields.integer("qk_rope_head_dim", 64),
        key_dim=fields.integer("qk_nope_head_dim", 128),
        value_dim=fields.integer("v_head_dim", 128),
        query_rank=_query_rank(values),
        pairs=pairs,
    )
    for key, size in (("qk_rope_head_dim", latent.rope_dim), ("kv_lora_rank", latent.rank)):
        if size % 2:
            raise ModelError(f"config.json: {key} is {size}; expected an even number")
    return replace(
        config,
        num_kv_heads=1,
        head_dim=latent.row,
        latent=latent,
        attention_scale=(latent.key_dim + latent.rope_dim) ** -0.5 * _scale_of_rope(values),
    )


def _query_rank(values: Mapping[str, Any]) -> int | None:
    """null means no latent of q; only a missing key has a default."""
    if "q_lora_rank" in values and values["q_lora_rank"] is None:
        return None
    return ConfigFields(values).integer("q_lora_rank", 1536)


def _scale_of_rope(values: Mapping[str, Any]) -> float:
    """What scores are multiplied by in addition in a longer context."""
    settings = rope_settings(values)
    if rope_type(settings, ROPE_TYPES) == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    fields = ConfigFields(settings)
    return yarn_scale(fields.number("factor"), fields.number("mscale_all_dim")) ** 2


V2_FAMILY = Family(
    read=read_v2,
    model=MODEL,
    examples="DeepSeek V2, V2 Lite",
    windows="refused",
    counts=LATENT_COUNTS,
)
V3_FAMILY = Family(
    read=read_v3,
    model=MODEL,
    examples="DeepSeek V3, R1",
    windows="refused",
    counts=LATENT_COUNTS,
)
