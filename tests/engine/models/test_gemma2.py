"""Gemma 2's config, norms, activation and soft caps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from baton_engine.config.families import read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import ModelError, UnsupportedModel
from baton_engine.layers.ops import gelu_tanh
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.estimate import count_weights
from baton_engine.models.gemma2.config import DENSE
from baton_engine.models.gemma2.model import Gemma2Norm
from baton_engine.models.registry import build_model
from baton_engine.weights.dummy import fill_slots

GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
CPU = torch.device("cpu")


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**GEMMA2, **changes}))
    return read_config(folder)


def test_a_gemma2_config_gets_the_defaults_of_its_family(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert (config.head_dim, config.tied, config.activation) == (256, True, "gelu_tanh")
    assert (config.embed_scale, config.logits_soft_cap) == (8.0, 30.0)
    assert config.windows == (4096, None, 4096)
    for spec, window in zip(config.attention, config.windows, strict=True):
        assert (spec.scale, spec.soft_cap, spec.window) == (1 / 16, 50.0, window)


def test_null_disables_soft_caps_and_windows(tmp_path: Path) -> None:
    keys = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    config = config_of(tmp_path, **dict.fromkeys(keys))
    assert (config.attention_soft_cap, config.logits_soft_cap) == (None, None)
    assert config.windows == (None, None, None)


def test_layer_types_choose_the_layers_with_a_window(tmp_path: Path) -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    assert config_of(tmp_path, layer_types=kinds).windows == (None, None, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_an_unsupported_value_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_of(tmp_path, **changes)


def test_an_invalid_soft_cap_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="attn_logit_softcapping is -1"):
        config_of(tmp_path, attn_logit_softcapping=-1)


@pytest.mark.parametrize("key", sorted(DENSE.more_keys - {"use_bidirectional_attention"}))
def test_each_key_that_only_gemma2_reads_is_in_the_fingerprint(tmp_path: Path, key: str) -> None:
    assert config_of(tmp_path, **{key: 7}).canonical() != config_of(tmp_path).canonical()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_of_a_norm_is_one_plus_the_checkpoints_in_float32(dtype: torch.dtype) -> None:
    slots = WeightSlots(dtype, CPU)
    norm = Gemma2Norm(slots, "norm", 64, 1e-6)
    stored, x = torch.randn(64).to(dtype) / 100, torch.randn(5, 64).to(dtype)
    slots.parameters["norm.weight"].load(stored)
    assert torch.equal(norm.weight_D, 1 + stored.float())
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (exact * (1 + stored.double())).to(dtype)
    actual = norm(x)
    assert actual.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_gelu_tanh_equals_torchs_and_does_not_depend_on_a_numbers_place() -> None:
    x = torch.randn(7, 333) * 4
    whole = gelu_tanh(x)
    torch.testing.assert_close(whole, F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)
    for begin in range(20):
        assert torch.equal(gelu_tanh(x[2:3, begin:]), whole[2:3, begin:])
    extreme = gelu_tanh(torch.tensor([-3e38, -1e4, 0.0, 1e4]))
    assert extreme.tolist() == [0.0, 0.0, 0.0, 1e4]


def test_logits_are_soft_capped(tiny_model: Callable[[str], Path]) -> None:
    config = read_config(tiny_model("gemma2"))
    slots = WeightSlots(torch.float32, CPU)
    model = build_model(config, slots)
    fill_slots(slots)
    for name, parameter in slots.parameters.items():
        if "embed" in name:
            parameter.place.mul_(100)
    slots.finish()
    cap = config.logits_soft_cap
    assert cap == 3.0
    logits_SV = model.logits(torch.randn(4, config.hidden_size))
    assert 0.9 * cap < logits_SV.abs().max() <= cap


def test_bfloat16_embeddings_are_scaled_by_the_root_of_the_hidden_size_in_bfloat16(
    tmp_path: Path,
) -> None:
    """transformers rounds the scale first: the root of 3,072 becomes 55.5."""
    config = config_of(tmp_path, hidden_size=96)
    assert config.embed_scale == math.sqrt(96)
    model = build_model(config, WeightSlots(torch.bfloat16, CPU))
    assert model._embed_scale == torch.tensor(math.sqrt(96)).bfloat16().item()


def test_gemma_2_2b_has_the_published_number_of_weights(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    assert count_weights(config_of(tmp_path, **sizes)) == 2_614_341_888
