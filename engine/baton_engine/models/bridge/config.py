"""The bridge as a family: it reads every config.json of a causal language model that transformers
knows.

In: config.json and generation_config.json. Out: a ModelConfig whose `bridge` has what only
transformers knows. transformers and torch are imported when such a file is read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from baton_engine.config.config_json import NO_KV_KEYS, checkpoint_dtype, eos_ids
from baton_engine.config.families import Family
from baton_engine.config.model_config import BridgeConfig, ModelConfig, RopeConfig
from baton_engine.errors import UnsupportedModel

# Keys of config.json that choose code, files or formats. The bridge chooses these itself.
DROPPED_KEYS = frozenset(
    {
        "_attn_implementation",
        "_experts_implementation",
        "attn_implementation",
        "distributed_config",
        "experts_implementation",
        "fusion_config",
        "kernel_config",
        "transformers_weights",
    }
)
# transformers checks these ids against the vocabulary, and may build an embedding with the last.
KEPT_KEYS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})


def need_transformers(architecture: str) -> None:
    """Raises UnsupportedModel if transformers is not installed."""
    if find_spec("transformers") is None:
        raise UnsupportedModel(
            f"architecture {architecture} is served by transformers' code, and transformers is not "
            "installed; pip install '.[bridge]' in the checkout"
        )


def kept_values(values: Mapping[str, Any], dropped: Collection[str]) -> str:
    """A config.json as JSON, without these keys."""
    kept = {key: value for key, value in values.items() if key not in dropped}
    return json.dumps(kept, sort_keys=True)


def read(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Raises UnsupportedModel, with the reason, for a model that the bridge cannot serve."""
    architecture = str(values["architectures"][0])
    need_transformers(architecture)
    from baton_engine.models.bridge.learn import learn
    from baton_engine.models.bridge.source import find_source

    dtype = checkpoint_dtype(values)
    text = kept_values(values, DROPPED_KEYS | (NO_KV_KEYS - KEPT_KEYS))
    source = find_source(architecture, text)
    learned = learn(source)
    return ModelConfig(
        architecture=architecture,
        vocab_size=learned.vocab_size,
        hidden_size=learned.hidden_size,
        intermediate_size=learned.widest,
        num_layers=len(learned.layers),
        num_heads=max(layer.num_heads for layer in learned.layers),
        num_kv_heads=max(layer.num_kv_heads for layer in learned.layers),
        head_dim=max(layer.head_dim for layer in learned.layers),
        max_positions=source.max_positions,
        tied=source.tied,
        eos_ids=eos_ids(values, generation),
        dtype=dtype,
        windows=_windows(tuple(layer.window for layer in learned.layers)),
        bridge=BridgeConfig(
            version=source.version,
            values=text,
            backbone=learned.backbone,
            weights=learned.weights,
            layers=learned.layers,
        ),
        # What follows is in transformers' code.
        norm_eps=0.0,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope=RopeConfig(type="none", theta=1.0),
    )


def _windows(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return windows if any(windows) else ()


FAMILY = Family(
    read=read,
    model="baton_engine.models.bridge.model:BridgeModel",
    examples="any other causal language model",
    windows="as the model has them",
)
