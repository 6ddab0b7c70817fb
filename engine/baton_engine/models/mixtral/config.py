"""Mixtral's config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from baton_engine.config.dense import Dense
from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import Family
from baton_engine.config.layer_counts import DECODER
from baton_engine.config.linear_shapes import Names, decoder_linears
from baton_engine.config.mixture import EXPERT_KEYS, all_layers, read_experts
from baton_engine.config.model_config import RopeConfig
from baton_engine.config.rope import read_rope
from baton_engine.config.windows import Windows

# The default of Mixtral's config class.
ROPE_THETA = 1e6

# The names of layers in checkpoints.
NAMES = Names(moe="block_sparse_moe", expert=("w1", "w3", "w2"))


def read_mixtral_experts(values: Mapping[str, Any]) -> ExpertsConfig:
    keys = {"count": "num_local_experts", "alias": "num_experts", "size": "intermediate_size"}
    return read_experts(values, all_layers(values), **keys, renormalize=True)


def read_mixtral_rope(values: Mapping[str, Any]) -> RopeConfig:
    return read_rope({"rope_theta": ROPE_THETA, **values})


FAMILY = Family(
    read=Dense(
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        default_kv_heads=8,
        default_eps=1e-5,
        windows=Windows("all"),
        rope=read_mixtral_rope,
        experts=read_mixtral_experts,
        more_keys=EXPERT_KEYS,
    ).read,
    model="baton_engine.models.mixtral.model:Mixtral",
    examples="Mixtral 8x7B and 8x22B",
    windows="by `sliding_window`, in every layer",
    counts=replace(DECODER, linears=partial(decoder_linears, names=NAMES)),
)
