"""Phi-3's config, its fused tensors, and which factors a longrope model uses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import ModelError, UnsupportedModel, WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.rotary import Rope, inverse_frequencies, rotate
from baton_engine.memory.estimate import count_weights
from baton_engine.models.phi3.config import DENSE
from baton_engine.models.registry import build_model
from baton_engine.weights.loader import load_weights
from baton_engine.weights.safetensors_files import SINGLE_NAME
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import GREEDY, generate_ids

ROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 4.0, 9.0],
}
PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
    "rope_scaling": ROPE,
}
QKV = "model.layers.1.self_attn.qkv_proj.weight"


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**PHI3, **changes}))
    return read_config(folder)


def test_a_phi3_config_gets_the_defaults_of_its_family(tmp_path: Path) -> None:
    config = config_of(tmp_path, rope_scaling=None, partial_rotary_factor=None)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 8, 1e-5)
    assert not any((config.tied, config.qkv_bias, config.output_bias, config.mlp_bias))
    assert config.windows == (None, None)
    assert (config.rope.type, config.rope.partial, config.rope.theta) == ("default", 1.0, 1e4)


def test_a_sliding_window_applies_to_every_layer(tmp_path: Path) -> None:
    assert config_of(tmp_path, sliding_window=100).windows == (100, 100)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_all_names_of_longrope_give_the_same_settings(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, rope_scaling={**ROPE, "type": name})
    assert config.rope == config_of(tmp_path).rope
    assert config.rope.short_factors == (1.0, 1.5, 2.0)
    assert config.rope.rotary_dim(config.head_dim) == 6
    # sqrt(1 + ln(1024 / 256) / ln(256))
    assert config.rope.attention_factor == pytest.approx(1.118034, abs=1e-6)


def test_the_maximum_length_of_a_sequence_chooses_the_factors(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config.rope.long
    short = config.limited_to(256)
    assert not short.rope.long
    assert short.canonical() != config.canonical()
    assert config.limited_to(257) == config
    plain = config_of(tmp_path, original_max_position_embeddings=1024)
    assert not plain.rope.long


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_an_unsupported_value_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {**ROPE, "short_factor": [1.0]}}, "short_factor has 1 entries"),
        ({"rope_scaling": {**ROPE, "long_factor": None}}, "has no long_factor"),
        (
            {"rope_scaling": {**ROPE, "long_factor": [1.0, "2", 3.0]}},
            r"long_factor is \[1.0, '2', 3.0\]",
        ),
        ({"partial_rotary_factor": 0.4}, "rotates 3 numbers"),
        ({"partial_rotary_factor": 1.5}, "rotates 12 numbers"),
    ],
)
def test_invalid_rope_settings_are_named_in_the_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, **changes)


OTHERS: dict[str, Any] = {
    "attention_factor": 1.5,
    "long_factor": [1.0, 4.0, 10.0],
    "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.5, 2.5],
}


@pytest.mark.parametrize("key", sorted(DENSE.more_keys | DENSE.more_rope_keys))
def test_each_key_that_only_phi3_reads_is_in_the_fingerprint(tmp_path: Path, key: str) -> None:
    before = config_of(tmp_path).canonical()
    if key in DENSE.more_keys:
        changed = config_of(tmp_path, **{key: OTHERS[key]})
    else:
        changed = config_of(tmp_path, rope_scaling={**ROPE, key: OTHERS[key]})
    assert changed.canonical() != before


@pytest.mark.parametrize("name", ["phi3-partial-window", "phi3-short-rope"])
def test_rope_frequencies_equal_those_of_transformers(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(name)
    expected = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    config = read_config(folder)
    actual = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(actual, expected.inv_freq, rtol=1e-6, atol=0)
    assert config.rope.attention_factor == expected.attention_scaling


def test_partial_rope_leaves_the_rest_of_a_head_unchanged(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    rope = Rope(config.rope, config.head_dim, torch.float32, torch.device("cpu"))
    heads_TXH = torch.randn(3, 2, 8)
    rotated_TXH = rotate(heads_TXH, rope.tables(torch.tensor([1, 5, 700])))
    assert torch.equal(rotated_TXH[..., 6:], heads_TXH[..., 6:])
    assert not torch.isclose(rotated_TXH[..., :6], heads_TXH[..., :6]).any()


@pytest.mark.parametrize(("max_model_len", "prompt_len"), [(64, 8), (None, 65)])
def test_ids_equal_those_of_transformers_on_both_sides_of_the_original_length(
    tmp_path: Path,
    max_model_len: int | None,
    prompt_len: int,
    tiny_model: Callable[[str], Path],
) -> None:
    """Up to 64 tokens transformers uses the short factors, and from 65 on the long ones."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("phi3-short-rope"), folder, ignore=shutil.ignore_patterns(".*"))
    values = json.loads((folder / "config.json").read_text())
    values["original_max_position_embeddings"] = 64
    values["rope_parameters"]["original_max_position_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps(values))
    settings = TorchSettings(
        model=folder, dtype="float32", threads=1, kv_blocks=70, max_model_len=max_model_len
    )
    prompt = prompt_of(prompt_len, seed=4)
    params = msgspec.structs.replace(GREEDY, max_tokens=40)
    [ids] = generate_ids(build_torch(settings), [prompt], params)
    compare(reference(folder, prompt, 40, ids), ids, Tally())


def load(folder: Path) -> WeightSlots:
    config = read_config(folder)
    slots = WeightSlots(torch.float32, torch.device("cpu"))
    build_model(config, slots)
    load_weights(folder, config, slots)
    return slots


def test_a_fused_tensor_fills_the_whole_projection(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("phi3-partial-window")
    tensors, slots = load_file(folder / SINGLE_NAME), load(folder)
    assert slots.parameters.keys() == tensors.keys()
    assert torch.equal(slots.parameters[QKV].place, tensors[QKV])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QKV), f"lacks {QKV}"),
        (lambda t: t.update({QKV: t[QKV][1:].clone()}), r"has shape \[127, 64\].*\[128, 64\]"),
        (
            lambda t: t.update({QKV.replace("qkv", "q"): torch.zeros(64, 64)}),
            r"no use for: model\.layers\.1\.self_attn\.q_proj\.weight",
        ),
    ],
)
def test_a_missing_extra_or_misshapen_fused_tensor_is_named_in_the_error(
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("phi3-partial-window"), folder)
    tensors = load_file(folder / SINGLE_NAME)
    change(tensors)
    save_file(tensors, folder / SINGLE_NAME)
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_phi3_mini_has_the_published_number_of_weights(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    config = config_of(tmp_path, rope_scaling=None, partial_rotary_factor=1.0, **sizes)
    assert count_weights(config) == 3_821_079_552
