"""Gemma 2's config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.dense import Dense
from baton_engine.config.families import Family
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.windows import Windows
from baton_engine.errors import UnsupportedModel

DENSE = Dense(
    mlp_bias=False,
    whole_heads=True,
    default_kv_heads=4,
    default_head_dim=256,
    default_tied=True,
    windows=Windows("alternating", 4096),
    activation_key="hidden_activation",
    activation="gelu_tanh",
    more_keys=frozenset(
        {
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "query_pre_attn_scalar",
            "use_bidirectional_attention",  # only false: anything else is refused
        }
    ),
)


def read(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    bidirectional = "use_bidirectional_attention"
    if values.get(bidirectional) is not None and ConfigFields(values).flag(bidirectional, False):
        raise UnsupportedModel("use_bidirectional_attention is not supported")
    config = DENSE.read(values, generation)
    return replace(
        config,
        norms_after=True,
        attention_scale=ConfigFields(values).integer("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=_soft_cap(values, "attn_logit_softcapping", 50.0),
        logits_soft_cap=_soft_cap(values, "final_logit_softcapping", 30.0),
        embed_scale=config.hidden_size**0.5,
    )


def _soft_cap(values: Mapping[str, Any], key: str, default: float) -> float | None:
    """The default applies only if the key is missing; null means no cap."""
    if key in values and values[key] is None:
        return None
    return ConfigFields(values).number(key, default)


FAMILY = Family(
    read=read,
    model="baton_engine.models.gemma2.model:Gemma2",
    examples="Gemma 2",
    windows="in every other layer",
)
