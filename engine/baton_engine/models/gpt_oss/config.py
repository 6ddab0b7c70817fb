"""gpt-oss' config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.dense import Dense
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import Family
from baton_engine.config.layer_counts import DECODER
from baton_engine.config.linear_shapes import LinearShape, Names, attention_linears
from baton_engine.config.mixture import all_layers, read_experts
from baton_engine.config.model_config import ModelConfig, RopeConfig
from baton_engine.config.rope import read_rope
from baton_engine.config.windows import Windows

# Defaults of the config class that other families do not have.
DEFAULTS: Mapping[str, Any] = {
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
}
DEFAULT_THETA = 150000.0
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Keys of config.json that have no effect but through ModelConfig.experts, and those that matter
# only in training.
EXPERT_KEYS = frozenset({"num_experts_per_tok", "num_local_experts", "swiglu_alpha"})
EXPERT_KEYS |= {"output_router_logits", "router_aux_loss_coef", "swiglu_limit"}


def read(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    return replace(DENSE.read({**DEFAULTS, **values}, generation), attention_sinks=True)


def read_gpt_oss_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    fields = ConfigFields(values)
    return read_experts(
        values,
        all_layers(values),
        count="num_local_experts",
        alias="num_experts",
        size="intermediate_size",
        scoring="softmax_of_chosen",
        renormalize=False,
        bias=True,
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
    )


def read_gpt_oss_rope(values: Mapping[str, Any]) -> RopeConfig:
    """yarn, if there are no rope settings. An empty `rope_parameters` means the default type."""
    filled = {"rope_theta": DEFAULT_THETA, **values}
    if values.get("rope_parameters") is None and not values.get("rope_scaling"):
        filled["rope_parameters"] = DEFAULT_ROPE
    return read_rope(filled)


def linears(config: ModelConfig, layer: int) -> Sequence[LinearShape]:
    """The experts of a layer are one layer of the checkpoint."""
    here, experts, hidden = f"model.layers.{layer}", config.experts, config.hidden_size
    assert experts is not None, "a config without experts"
    name, count = f"{here}.mlp.experts", experts.num_experts
    return (
        *attention_linears(config, f"{here}.self_attn", Names()),
        LinearShape(name, 2 * experts.size, hidden, count),
        LinearShape(name, hidden, experts.size, count),
    )


DENSE = Dense(
    mlp_bias=False,
    default_kv_heads=8,
    default_head_dim=64,
    default_eps=1e-5,
    windows=Windows("alternating", 128),
    rope=read_gpt_oss_rope,
    experts=read_gpt_oss_experts,
    more_keys=EXPERT_KEYS,
)
FAMILY = Family(
    read=read,
    model="baton_engine.models.gpt_oss.model:GptOss",
    examples="gpt-oss, also with experts in MXFP4",
    windows="in every other layer",
    counts=replace(DECODER, linears=linears),
)
