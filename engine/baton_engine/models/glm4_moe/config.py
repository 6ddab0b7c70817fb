"""GLM-4.5's config.json. No torch.

Its checkpoints have further layers that draft tokens (multi-token prediction). They are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.config.config_json import MOST_LAYERS, ConfigFields
from baton_engine.config.dense import Dense
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import Family
from baton_engine.config.mixture import EXPERT_KEYS, later_layers, read_experts
from baton_engine.config.model_config import ModelConfig, RopeConfig
from baton_engine.config.rope import read_partial_rope

# The keys of config.json for the number of drafting layers; one is the default.
DRAFT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


def read_glm_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    fields = ConfigFields(values)
    return read_experts(
        values,
        later_layers(values, 1),
        count="n_routed_experts",
        alias="num_local_experts",
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        choice_bias=True,
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_score="two_best",
        shared_size=fields.integer("n_shared_experts", 1) * fields.integer("moe_intermediate_size"),
        float32_router=True,
    )


def read_glm_rope(values: Mapping[str, Any]) -> RopeConfig:
    return read_partial_rope(values, 0.5)


DENSE = Dense(
    output_bias=False,
    mlp_bias=False,
    default_kv_heads=8,
    default_eps=1e-5,
    rope=read_glm_rope,
    experts=read_glm_experts,
    more_keys=EXPERT_KEYS
    | {
        *DRAFT_KEYS,
        "first_k_dense_replace",
        "n_group",
        "n_shared_experts",
        "routed_scaling_factor",
        "topk_group",
        "use_qk_norm",
    },
)


def read(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    fields, config = ConfigFields(values), DENSE.read(values, generation)
    drafts = max(fields.integer(key, 1, least=0, most=MOST_LAYERS) for key in DRAFT_KEYS)
    layers = range(config.num_layers, config.num_layers + drafts)
    return replace(
        config,
        qk_norm=fields.flag("use_qk_norm", False),
        unused_tensors=tuple(f"model.layers.{layer}." for layer in layers),
    )


FAMILY = Family(
    read=read,
    model="baton_engine.models.glm4_moe.model:Glm4Moe",
    examples="GLM-4.5, GLM-4.6",
    windows="refused",
)
