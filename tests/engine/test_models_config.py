"""config.json and generation_config.json: both spellings, defaults per family, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_engine.config import ModelConfig, compute_dtype, read_config
from baton_engine.errors import ModelError, UnsupportedModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "rope_theta": 500000.0,
}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}
SWITCHED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 512}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def config_of(
    folder: Path, generation: dict[str, Any] | None = None, **changes: Any
) -> ModelConfig:
    values = {**LLAMA, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_plain_llama_fills_in_its_defaults(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    switches = (config.tied, config.qkv_bias, config.output_bias, config.mlp_bias)
    assert not any(switches)
    assert (config.rope.type, config.rope.theta, config.eos_ids) == ("default", 500000.0, ())


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_both_spellings_of_rope_give_the_same_settings(tmp_path: Path, key: str) -> None:
    old = config_of(tmp_path, rope_scaling={key: "llama3", **LLAMA3})
    new = config_of(
        tmp_path,
        rope_theta=None,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    )
    assert old.rope == new.rope
    assert old.rope.canonical() == new.rope.canonical()
    assert old.rope.original_max_positions == 256
    assert old.rope.canonical() != config_of(tmp_path).rope.canonical()


def test_generation_configs_list_of_eos_ids_wins(tmp_path: Path) -> None:
    assert config_of(tmp_path, eos_token_id=2).eos_ids == (2,)
    assert config_of(tmp_path, {"eos_token_id": [7, 9]}, eos_token_id=2).eos_ids == (7, 9)


def test_qwen3_assumes_its_own_head_dim_and_normalises_q_and_k(tmp_path: Path) -> None:
    config = config_of(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (config.head_dim, config.qk_norm) == (128, True)


def test_qwen2_has_biases_on_q_k_and_v_only(tmp_path: Path) -> None:
    config = config_of(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (config.qkv_bias, config.output_bias) == (True, False)


def test_dtype_auto_is_the_checkpoints_and_float16_runs_in_float32(tmp_path: Path) -> None:
    for spelled, expected in (("bfloat16", "bfloat16"), ("float16", "float32"), (None, "float32")):
        assert compute_dtype(config_of(tmp_path, torch_dtype=spelled), "auto") == expected
    assert compute_dtype(config_of(tmp_path, dtype="bfloat16"), "float32") == "float32"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "none named"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}, "Qwen3MoeForCausalLM"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"sliding_window": 512}, "512"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        (
            {**MISTRAL, "sliding_window": 512, "layer_types": ["full_attention"] * 2},
            "full_attention.*512",
        ),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"dtype": "int4"}, "int4"),
        ({"num_key_value_heads": 3}, "3"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named) as caught:
        config_of(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},  # not below max_position_embeddings: never in use
        {"sliding_window": None},
        {"sliding_window": 512, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {**MISTRAL, "sliding_window": None},
        {**MISTRAL, "sliding_window": 1024},
        MISTRAL,  # its config class assumes 4096, which is above max_position_embeddings
        {**QWEN3, "sliding_window": 512},  # the switch is off unless it is on
        {**QWEN3, "sliding_window": 512, "use_sliding_window": True},  # from layer 28 on
        {**QWEN3, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_sliding_window_that_is_not_in_use_is_no_obstacle(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = config_of(tmp_path, **changes)
    assert config.windows == (None, None)
    assert config.canonical() == config.rope.canonical()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({**MISTRAL, "sliding_window": 512}, (512, 512)),
        ({**MISTRAL, "max_position_embeddings": 8192}, (4096, 4096)),
        ({**QWEN3, **SWITCHED, "max_window_layers": 1}, (None, 512)),
        ({**QWEN3, **SWITCHED, "max_window_layers": 0}, (512, 512)),
        (
            {**QWEN3, **SWITCHED, "layer_types": ["sliding_attention", "full_attention"]},
            (512, None),
        ),
        (
            {**SWITCHED, "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1},
            (None, 512),
        ),
    ],
)
def test_sliding_windows_are_read_per_layer(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert config_of(tmp_path, **changes).windows == windows


def test_other_windows_are_another_text_of_the_fingerprint(tmp_path: Path) -> None:
    """The same tokens get other KV: it must not be exchanged."""
    texts = {
        config_of(tmp_path, **MISTRAL, sliding_window=window).canonical()
        for window in (None, 256, 512)
    } | {
        config_of(tmp_path, **QWEN3, **SWITCHED, layer_types=kinds).canonical()
        for kinds in (["sliding_attention", "full_attention"], ["full_attention"] * 2)
    }
    assert len(texts) == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({**MISTRAL, "sliding_window": -1}, "sliding_window is -1"),
        ({**QWEN3, **SWITCHED, "max_window_layers": "all"}, "max_window_layers is 'all'"),
    ],
)
def test_a_missing_or_senseless_number_is_named(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        config_of(tmp_path, **changes)


def test_a_folder_that_is_none_has_no_config_or_broken_json_is_one_clear_line(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        read_config(tmp_path)
