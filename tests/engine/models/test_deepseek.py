"""DeepSeek's config.json: what it means for attention, the KV layout and the fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.config.latent import LatentConfig
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import ModelError, SettingsError, UnsupportedModel
from baton_engine.memory.requirements import layout_of
from baton_protocol.layout import LATENT, KVField

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "max_position_embeddings": 1024},
    **{"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 128}


def read(folder: Path, version: int, **values: Any) -> ModelConfig:
    named = {"architectures": [f"DeepseekV{version}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**SIZES, **named, **values}))
    return read_config(folder)


def test_missing_keys_have_the_defaults_of_each_version(tmp_path: Path) -> None:
    second, third = read(tmp_path, 2), read(tmp_path, 3)
    sizes = {"rank": 512, "rope_dim": 64, "key_dim": 128, "value_dim": 128, "query_rank": 1536}
    assert second.latent == third.latent == LatentConfig(**sizes, pairs=True)
    assert second.experts is not None
    assert third.experts is not None
    assert (second.experts.layers[0], third.experts.layers) == (True, (False,) * 3 + (True,))
    assert (second.experts.groups, third.experts.groups) == (1, 8)
    assert third.unused_tensors == ("model.layers.4.",)


def test_a_layer_keeps_one_row_that_cannot_be_divided(tmp_path: Path) -> None:
    config = read(tmp_path, 3, kv_lora_rank=32, qk_rope_head_dim=16)
    [spec, *_] = config.attention
    assert (spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.latent) == (1, 48, 32, True)
    layout = layout_of(TorchSettings(model=tmp_path), config)
    assert layout.kv_fields == (KVField(LATENT, 1, 48, "float32"),)
    with pytest.raises(SettingsError, match=r"--kv-shards 2 does not divide .* latent rows.* 1$"):
        layout_of(TorchSettings(model=tmp_path, kv_shards=2), config)


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        ({}, 1.0),
        ({"mscale": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.8738542070926265),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.5896266117542955),
    ],
)
def test_yarn_scales_scores_by_mscale_all_dim(
    tmp_path: Path, rope: dict[str, float], factor: float
) -> None:
    config = read(tmp_path, 2, rope_scaling={**YARN, **rope})
    assert config.attention[0].scale == pytest.approx(192**-0.5 * factor)


@pytest.mark.parametrize(
    ("version", "values", "error", "text"),
    [
        (2, {"topk_method": "noaux_tc"}, UnsupportedModel, r"topk_method 'noaux_tc'.*greedy"),
        (2, {"topk_method": "group_limited_greedy"}, ModelError, "n_group"),
        (3, {"qk_rope_head_dim": 7}, ModelError, "qk_rope_head_dim is 7"),
        (3, {"kv_lora_rank": 0}, ModelError, "kv_lora_rank is 0"),
        (3, {"q_lora_rank": "x"}, ModelError, "q_lora_rank is 'x'"),
        (3, {"rope_interleave": 1}, ModelError, "rope_interleave is 1"),
    ],
)
def test_a_wrong_value_is_named(
    tmp_path: Path, version: int, values: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        read(tmp_path, version, **values)


def test_every_size_of_latent_attention_is_in_the_fingerprint(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        *({key: 32} for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")),
        *({"v_head_dim": 32}, {"q_lora_rank": None}, {"rope_interleave": False}),
    ]
    texts = {read(tmp_path, 3, **each).canonical() for each in [{}, *changes]}
    assert len(texts) == len(changes) + 1
