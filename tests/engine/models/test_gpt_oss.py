"""gpt-oss' config, and its experts' fused and transposed tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import ModelError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.estimate import count_weights
from baton_engine.models.gpt_oss.config import EXPERT_KEYS
from baton_engine.models.gpt_oss.model import fused_experts

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_local_experts": 5,
    "max_position_embeddings": 131_072,
}
TRAINING_KEYS = {"output_router_logits", "router_aux_loss_coef"}


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**GPT_OSS, **changes}))
    return read_config(folder)


def test_a_gpt_oss_config_gets_the_defaults_of_its_family(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (64, 8, 1e-5)
    assert (config.qkv_bias, config.output_bias, config.tied) == (True, True, False)
    assert [(each.sinks, each.window) for each in config.attention] == [
        (True, 128),
        (True, None),
        (True, 128),
    ]
    rope = config.rope
    assert (rope.type, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert rope.original_max_positions == 4096
    assert config.experts == ExpertsConfig(
        num_experts=5,
        top_k=4,
        size=48,
        layers=(True,) * 3,
        scoring="softmax_of_chosen",
        renormalize=False,
        bias=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    )


def test_rope_without_scaling_is_read_as_it_is_written(tmp_path: Path) -> None:
    config = config_of(tmp_path, rope_parameters={"rope_type": "default"})
    assert (config.rope.type, config.rope.theta) == ("default", 150000.0)


@pytest.mark.parametrize("key", sorted(EXPERT_KEYS))
def test_keys_of_the_experts_are_in_the_fingerprint_unless_they_matter_only_in_training(
    tmp_path: Path, key: str
) -> None:
    changed = config_of(tmp_path, **{key: 6 if key == "num_local_experts" else 2})
    assert (changed.canonical() == config_of(tmp_path).canonical()) == (key in TRAINING_KEYS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6; expected at most 5"),
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"swiglu_limit": -1}, "swiglu_limit is -1"),
    ],
)
def test_an_invalid_number_is_named_in_the_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, **changes)


def test_columns_of_gate_and_up_in_turn_become_rows_first_those_of_the_gate(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    assert config.experts is not None
    count, size, hidden = 5, config.experts.size, config.hidden_size
    slots = WeightSlots(torch.float32, torch.device("cpu"))
    weights = fused_experts(slots, "mlp.experts", hidden, config.experts)
    stored = {
        f"mlp.experts.{name}": torch.randn(shape)
        for name, shape in {
            "gate_up_proj": (count, hidden, 2 * size),
            "gate_up_proj_bias": (count, 2 * size),
            "down_proj": (count, size, hidden),
            "down_proj_bias": (count, hidden),
        }.items()
    }
    assert {name: each.shape for name, each in slots.parameters.items()} == {
        name: each.shape for name, each in stored.items()
    }
    for name, parameter in slots.parameters.items():
        parameter.load(stored[name])
    columns, bias = stored["mlp.experts.gate_up_proj"], stored["mlp.experts.gate_up_proj_bias"]
    gate, up = columns[..., 0::2], columns[..., 1::2]
    assert torch.equal(weights.gate_up_EGD, torch.cat((gate, up), -1).transpose(1, 2))
    assert weights.gate_up_bias_EG is not None
    assert torch.equal(weights.gate_up_bias_EG, torch.cat((bias[:, 0::2], bias[:, 1::2]), 1))
    assert torch.equal(weights.down_EDF, stored["mlp.experts.down_proj"].transpose(1, 2))
    assert weights.down_bias_ED is not None
    assert torch.equal(weights.down_bias_ED, stored["mlp.experts.down_proj_bias"])
    assert weights.gate_up_EGD.is_contiguous()
    assert weights.down_EDF.is_contiguous()


def test_gpt_oss_20b_has_the_published_number_of_weights(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_local_experts": 32,
    }
    assert count_weights(config_of(tmp_path, **sizes)) == 20_914_757_184
