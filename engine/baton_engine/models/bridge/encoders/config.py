"""Encoders as a family: it reads the config.json of every encoder that transformers knows.

In: config.json. Out: a ModelConfig whose `bridge` says that it is an encoder. transformers and
torch are imported when such a file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import checkpoint_dtype
from baton_engine.config.families import Family
from baton_engine.config.model_config import (
    AttentionSpec,
    BridgeConfig,
    ModelConfig,
    RopeConfig,
)
from baton_engine.models.bridge.config import DROPPED_KEYS, kept_values, need_transformers


def read(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Raises UnsupportedModel, with the reason, for a model that is no encoder."""
    architecture = str(values["architectures"][0])
    need_transformers(architecture)
    from baton_engine.models.bridge.encoders.source import find_encoder, sizes_of

    text = kept_values(values, DROPPED_KEYS)
    source = find_encoder(architecture, text)
    sizes, described = sizes_of(source), source.text
    layers, heads = described.num_hidden_layers, described.num_attention_heads
    size = described.hidden_size // heads
    head_dim = size + size % 2
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=described.vocab_size,
        hidden_size=described.hidden_size,
        intermediate_size=sizes.widest,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_positions=sizes.positions,
        tied=False,
        eos_ids=(),
        dtype=checkpoint_dtype(values),
        bridge=BridgeConfig(
            version=source.version,
            values=text,
            backbone="",
            weights=sizes.weights,
            layers=(spec,) * layers,
            encoder=True,
        ),
        # What follows is in transformers' code.
        norm_eps=0.0,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=RopeConfig(type="none", theta=1.0),
    )


FAMILY = Family(
    read=read,
    model="baton_engine.models.bridge.encoders.model:EncoderModel",
    examples="encoders",
    windows="as the model has them",
)
