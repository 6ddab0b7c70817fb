"""config.json and generation_config.json: both spellings, defaults per family, clear errors."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from baton_engine.config.config_json import NO_KV_KEYS
from baton_engine.config.dense import READ_KEYS, READ_ROPE_KEYS
from baton_engine.config.families import read_config
from baton_engine.config.model_config import NO_KV_FIELDS, ModelConfig, RopeConfig, compute_dtype
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
# transformers has numbers of its own for the KV heads of a file without them.
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_key_value_heads": 4,
}
MIXTRAL: dict[str, Any] = {**EXPERTS, "architectures": ["MixtralForCausalLM"]}
QWEN2_MOE: dict[str, Any] = {**EXPERTS, "architectures": ["Qwen2MoeForCausalLM"]}
QWEN3_MOE: dict[str, Any] = {**EXPERTS, "architectures": ["Qwen3MoeForCausalLM"]}
WITH_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 512}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "truncate": True,
}


def config_of(
    folder: Path, generation: dict[str, Any] | None = None, **changes: Any
) -> ModelConfig:
    values = {**LLAMA, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_a_plain_llama_config_gets_the_defaults_of_its_family(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    flags = (config.tied, config.qkv_bias, config.output_bias, config.mlp_bias)
    assert not any(flags)
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
    assert old.canonical() == new.canonical()
    assert old.rope.original_max_positions == 256
    assert old.canonical() != config_of(tmp_path).canonical()


def test_eos_ids_of_generation_config_take_precedence(tmp_path: Path) -> None:
    assert config_of(tmp_path, eos_token_id=2).eos_ids == (2,)
    assert config_of(tmp_path, {"eos_token_id": [7, 9]}, eos_token_id=2).eos_ids == (7, 9)


def test_qwen3_assumes_its_own_head_dim_and_normalises_q_and_k(tmp_path: Path) -> None:
    config = config_of(tmp_path, **QWEN3)
    assert (config.head_dim, config.qk_norm) == (128, True)


def test_qwen2_has_biases_on_q_k_and_v_only(tmp_path: Path) -> None:
    config = config_of(tmp_path, **QWEN2)
    assert (config.qkv_bias, config.output_bias) == (True, False)


def test_dtype_auto_follows_the_checkpoint_and_computes_float16_in_float32(tmp_path: Path) -> None:
    for spelled, expected in (("bfloat16", "bfloat16"), ("float16", "float32"), (None, "float32")):
        assert compute_dtype(config_of(tmp_path, torch_dtype=spelled), "auto") == expected
    assert compute_dtype(config_of(tmp_path, dtype="bfloat16"), "float32") == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "none named"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"sliding_window": 512}, "512"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        (
            {**MISTRAL, "sliding_window": 512, "layer_types": ["full_attention"] * 2},
            "full_attention.*512",
        ),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "fbgemm_fp8"),
        ({"dtype": "int4"}, "int4"),
        ({"num_key_value_heads": 3}, "3"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message) as error:
        config_of(tmp_path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},  # at least max_position_embeddings, so it has no effect
        {"sliding_window": None},
        {"sliding_window": 512, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {**MISTRAL, "sliding_window": None},
        {**MISTRAL, "sliding_window": 1024},
        MISTRAL,  # the default of 4096 is above max_position_embeddings
        {**QWEN3, "sliding_window": 512},  # use_sliding_window is off by default
        {**QWEN3, "sliding_window": 512, "use_sliding_window": True},  # only from layer 28 on
        {**QWEN3, "layer_types": ["full_attention"] * 2},
        {**QWEN2_MOE, "sliding_window": 512},
        {**QWEN3_MOE, "sliding_window": 512},
        MIXTRAL,
    ],
)
def test_a_sliding_window_that_has_no_effect_is_ignored(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = config_of(tmp_path, **changes)
    assert config.windows == (None, None)
    windows = {"sliding_window", "use_sliding_window", "layer_types"}
    without = {key: value for key, value in changes.items() if key not in windows}
    assert config.canonical() == config_of(tmp_path, **without).canonical()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({**MISTRAL, "sliding_window": 512}, (512, 512)),
        ({**MISTRAL, "max_position_embeddings": 8192}, (4096, 4096)),
        ({**QWEN3, **WITH_WINDOW, "max_window_layers": 1}, (None, 512)),
        ({**QWEN3, **WITH_WINDOW, "max_window_layers": 0}, (512, 512)),
        (
            {**QWEN3, **WITH_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
            (512, None),
        ),
        (
            {**QWEN2, **WITH_WINDOW, "max_window_layers": 1},
            (None, 512),
        ),
        ({**MIXTRAL, "sliding_window": 512}, (512, 512)),
        ({**QWEN2_MOE, **WITH_WINDOW, "num_hidden_layers": 3}, (512, None, 512)),
        ({**QWEN2_MOE, **WITH_WINDOW, "max_window_layers": 0}, (None, None)),
        (
            {**QWEN2_MOE, **WITH_WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
            (None, 512),
        ),
        ({**QWEN3_MOE, **WITH_WINDOW, "max_window_layers": 1}, (512, 512)),
    ],
)
def test_sliding_windows_are_read_per_layer(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert config_of(tmp_path, **changes).windows == windows


def test_sliding_windows_are_in_the_fingerprint(tmp_path: Path) -> None:
    """With another window the same tokens have other KV, so nodes must not exchange it."""
    texts = {
        config_of(tmp_path, **MISTRAL, sliding_window=window).canonical()
        for window in (None, 256, 512)
    } | {
        config_of(tmp_path, **QWEN3, **WITH_WINDOW, layer_types=kinds).canonical()
        for kinds in (["sliding_attention", "full_attention"], ["full_attention"] * 2)
    }
    assert len(texts) == 5


# A config with an explicit value for each key that is read.
EXPLICIT: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "layer_types": ["full_attention", "sliding_attention"],
    "max_window_layers": 1,
    "mlp_bias": False,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
}
# Another value for each of these keys.
OTHERS: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_bias": True,
    "head_dim": 32,
    "hidden_act": "gelu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "mlp_bias": True,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 10000.0,
    "sliding_window": 256,
    "tie_word_embeddings": False,
    "vocab_size": 640,
}
# The same for keys that matter only without `layer_types`.
WITHOUT_LAYER_TYPES: dict[str, Any] = {"max_window_layers": 0, "use_sliding_window": False}


@pytest.mark.parametrize("key", sorted(READ_KEYS))
def test_each_key_of_config_json_that_is_read_is_in_the_fingerprint(
    tmp_path: Path, key: str
) -> None:
    """A few keys have only one supported value, so any other is refused."""
    base, changed = dict(EXPLICIT), {**EXPLICIT, key: (OTHERS | WITHOUT_LAYER_TYPES)[key]}
    for values in (base, changed):
        if key in WITHOUT_LAYER_TYPES:
            del values["layer_types"]
        elif key == "num_hidden_layers":
            values["layer_types"] = ["full_attention"] * values[key]
    before = config_of(tmp_path, **base)
    if key in ("hidden_act", "partial_rotary_factor"):
        with pytest.raises(UnsupportedModel, match=str(OTHERS[key])):
            config_of(tmp_path, **changed)
    else:
        assert config_of(tmp_path, **changed).canonical() != before.canonical()


@pytest.mark.parametrize("key", sorted(READ_ROPE_KEYS))
@pytest.mark.parametrize("part", ["rope_scaling", "rope_parameters"])
def test_each_key_of_the_rope_settings_is_in_the_fingerprint(
    tmp_path: Path, part: str, key: str
) -> None:
    kind = "type" if key == "type" else "rope_type"
    own = {"rope_theta": 500000.0, "partial_rotary_factor": 1.0}
    rope = {**LLAMA3, kind: "llama3", **own}
    if key not in rope:
        rope = {**YARN, "rope_type": "yarn", **own}
        if key == "attention_factor":
            rope[key] = 1.5
    others: dict[str, Any] = {"original_max_position_embeddings": 128, "truncate": False}
    other = {kind: "linear", **others}.get(key, 0.5)
    before = config_of(tmp_path, **{part: rope})
    changed = {part: {**rope, key: other}}
    if key == "partial_rotary_factor":
        with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor 0\.5"):
            config_of(tmp_path, **changed)
    else:
        assert config_of(tmp_path, **changed).canonical() != before.canonical()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "other"},
        {"attention_multiplier": 0.5},
        {"a_field_of_next_year": {"b": 1}},
        {"rope_scaling": {"rope_type": "default", "a_new_factor": 0.7}},
        {"rope_parameters": {"rope_type": "default", "a_new_factor": 0.7}},
    ],
)
def test_an_unknown_key_is_in_the_fingerprint(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert config_of(tmp_path, **changes).canonical() != config_of(tmp_path).canonical()


@pytest.mark.parametrize("key", sorted(NO_KV_KEYS))
def test_a_key_that_does_not_affect_kv_is_not_in_the_fingerprint(tmp_path: Path, key: str) -> None:
    other: Any = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}.get(key, 7)
    assert config_of(tmp_path, **{key: other}).canonical() == config_of(tmp_path).canonical()


def test_each_field_of_model_config_that_affects_kv_is_in_the_fingerprint(
    tmp_path: Path,
) -> None:
    """A field that is added later is in the fingerprint by default."""
    config = config_of(tmp_path)
    others: dict[str, Any] = {"rope": RopeConfig(type="linear", theta=500000.0, factor=2.0)}
    for each in fields(config):
        changed = replace(config, **{each.name: others.get(each.name, "other")})
        counts = changed.canonical() != config.canonical()
        assert counts == (each.name not in NO_KV_FIELDS), each.name


def test_an_explicit_default_gives_the_same_fingerprint(tmp_path: Path) -> None:
    explicit: dict[str, Any] = {
        **{"num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
        **{"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
        **{"rope_scaling": None, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    }
    assert config_of(tmp_path, **explicit).canonical() == config_of(tmp_path).canonical()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {**YARN, "type": "yarn", "truncate": "no"}}, "truncate is 'no'"),
        ({"rope_theta": 1, "rope_scaling": {**YARN, "type": "yarn"}}, r"rope_theta is 1\.0"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; expected .* 2"),
        ({**MISTRAL, "sliding_window": -1}, "sliding_window is -1"),
        ({**QWEN3, **WITH_WINDOW, "max_window_layers": "all"}, "max_window_layers is 'all'"),
    ],
)
def test_a_missing_or_invalid_number_is_named_in_the_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, **changes)


def test_a_missing_folder_a_missing_config_and_invalid_json_are_clear_errors(
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
