"""Mixtures of experts: what config.json says of the experts, and which tensors are theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.families import read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import ModelError, UnsupportedModel, WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.estimate import count_weights
from baton_engine.models.registry import build_model
from baton_engine.weights.digest import tensor_digests
from baton_engine.weights.loader import load_weights
from baton_engine.weights.safetensors_files import SINGLE_NAME
from tests.support.engines.exactness import Tally, compare, reference
from tests.support.engines.tiny_models import prompt_of
from tests.support.engines.torch_engines import generate_ids, small_engine

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": 2,
}
SIZED = {"moe_intermediate_size": 32}
# The keys that a config of each family needs in addition.
NEEDED: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {**SIZED, "n_routed_experts": 8},
    "MixtralForCausalLM": {"num_local_experts": 8},
    "OlmoeForCausalLM": {"num_experts": 8},
    "Qwen2MoeForCausalLM": {**SIZED, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "Qwen3MoeForCausalLM": {**SIZED, "num_experts": 8},
}
GLM, MIXTRAL, OLMOE, QWEN2, QWEN3 = NEEDED


def config_of(folder: Path, architecture: str, **changes: Any) -> ModelConfig:
    values = {**COMMON, **NEEDED[architecture], "architectures": [architecture], **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def experts_of(folder: Path, architecture: str, **changes: Any) -> ExpertsConfig:
    experts = config_of(folder, architecture, **changes).experts
    assert experts is not None
    return experts


def test_each_family_has_the_experts_of_its_config_class(tmp_path: Path) -> None:
    some: dict[str, Any] = {"num_experts": 8, "top_k": 2, "layers": (True,) * 4}
    plain = ExpertsConfig(**some, size=32, scoring="softmax", renormalize=False)
    assert experts_of(tmp_path, QWEN3) == plain
    assert experts_of(tmp_path, QWEN2) == ExpertsConfig(
        **some,
        size=32,
        scoring="softmax",
        renormalize=False,
        shared_size=48,
        shared_gate=True,
    )
    assert experts_of(tmp_path, OLMOE) == ExpertsConfig(
        **some, size=128, scoring="softmax", renormalize=False
    )
    assert experts_of(tmp_path, MIXTRAL) == ExpertsConfig(
        **some, size=128, scoring="softmax", renormalize=True
    )
    assert experts_of(tmp_path, GLM) == ExpertsConfig(
        **{**some, "layers": (False, True, True, True)},
        size=32,
        scoring="sigmoid",
        renormalize=True,
        choice_bias=True,
        group_score="two_best",
        shared_size=32,
        float32_router=True,
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "layers"),
    [
        (QWEN2, {"decoder_sparse_step": 2}, (False, True, False, True)),
        (QWEN3, {"decoder_sparse_step": 3}, (False, False, True, False)),
        (QWEN3, {"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        (
            QWEN3,
            {"mlp_only_layers": [1], "decoder_sparse_step": 2},
            (False, False, False, True),
        ),
        (QWEN3, {"mlp_only_layers": None}, (True,) * 4),
        (GLM, {"first_k_dense_replace": 0}, (True,) * 4),
        (GLM, {"first_k_dense_replace": 3}, (False, False, False, True)),
        (GLM, {"first_k_dense_replace": 9}, (False,) * 4),
    ],
)
def test_each_family_says_which_layers_have_experts(
    tmp_path: Path, architecture: str, changes: dict[str, Any], layers: tuple[bool, ...]
) -> None:
    assert experts_of(tmp_path, architecture, **changes).layers == layers


def test_the_number_of_experts_has_several_spellings(tmp_path: Path) -> None:
    """transformers 5 saves Qwen3-MoE's as num_local_experts."""
    usual = config_of(tmp_path, QWEN3)
    other = config_of(tmp_path, QWEN3, num_experts=None, num_local_experts=8)
    assert usual.canonical() == other.canonical()


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (QWEN3, {"num_experts": None}, "has no num_experts"),
        (MIXTRAL, {"num_local_experts": None}, "has no num_local_experts"),
        (GLM, {"n_routed_experts": None}, "has no n_routed_experts"),
        (QWEN3, {"num_local_experts": 4}, r"num_experts and num_local_experts are \[4, 8\]"),
        (QWEN3, {"num_experts": 0}, "num_experts is 0"),
        (QWEN3, {"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        (QWEN3, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most 8"),
        (QWEN3, {"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        (QWEN3, {"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3, {"mlp_only_layers": 1}, "mlp_only_layers is 1; expected a list"),
        (QWEN3, {"mlp_only_layers": [-1]}, r"mlp_only_layers is \[-1\]"),
        (QWEN2, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (QWEN2, {"qkv_bias": "yes"}, "qkv_bias is 'yes'"),
        (OLMOE, {"clip_qkv": 0}, "clip_qkv is 0"),
        (GLM, {"n_group": 3}, "8 experts cannot be divided into n_group 3"),
        (GLM, {"topk_group": 2}, "topk_group 2"),
        (GLM, {"n_group": 8, "topk_group": 4}, "n_group 8 leaves one expert in a group"),
        (GLM, {"n_group": 4, "num_experts_per_tok": 3}, "is 3; expected at most 2"),
        (GLM, {"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 rotates 1 numbers"),
        (GLM, {"rope_scaling": {"partial_rotary_factor": 1.5}}, "1.5 rotates 24 numbers"),
        (GLM, {"use_qk_norm": 0}, "use_qk_norm is 0"),
    ],
)
def test_a_missing_or_invalid_field_of_the_experts_is_named(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as error:
        config_of(tmp_path, architecture, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("architecture", [OLMOE, GLM])
def test_a_window_in_a_family_without_windows_is_refused(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window 512 is not supported"):
        config_of(tmp_path, architecture, sliding_window=512)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (GLM, {"first_k_dense_replace": 2}),
        (GLM, {"n_group": 2}),
        (GLM, {"n_group": 4, "topk_group": 2}),
        (GLM, {"n_group": 4, "topk_group": 3}),
        (GLM, {"n_routed_experts": 16}),
        (GLM, {"n_shared_experts": 2}),
        (GLM, {"norm_topk_prob": False}),
        (GLM, {"partial_rotary_factor": 0.25}),
        (GLM, {"routed_scaling_factor": 2.5}),
        (GLM, {"use_qk_norm": True}),
        (GLM, {"attention_bias": True}),
        (MIXTRAL, {"intermediate_size": 64}),
        (MIXTRAL, {"num_local_experts": 16}),
        (OLMOE, {"clip_qkv": 2.0}),
        (OLMOE, {"clip_qkv": 3.0}),
        (QWEN2, {"qkv_bias": False}),
        (QWEN2, {"shared_expert_intermediate_size": 64}),
        (QWEN3, {"decoder_sparse_step": 2}),
        (QWEN3, {"mlp_only_layers": [1]}),
        (QWEN3, {"moe_intermediate_size": 64}),
        (QWEN3, {"norm_topk_prob": True}),
        (QWEN3, {"num_experts_per_tok": 1}),
    ],
)
def test_each_field_of_the_experts_is_in_the_fingerprint_once(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    plain, changed = (config_of(tmp_path, architecture, **each) for each in ({}, changes))
    assert plain.canonical() != changed.canonical()
    assert plain.unread == changed.unread == ()


def test_a_default_of_a_family_may_be_given_or_omitted(tmp_path: Path) -> None:
    defaults: dict[str, dict[str, Any]] = {
        GLM: {
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_qk_norm": False},
            **{"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
        },
        MIXTRAL: {"rope_theta": 1e6, "sliding_window": None, "router_jitter_noise": 0.0},
        OLMOE: {"norm_topk_prob": False, "clip_qkv": None, "router_aux_loss_coef": 0.01},
        QWEN2: {"decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": True},
        QWEN3: {"norm_topk_prob": False, "mlp_only_layers": [], "output_router_logits": False},
    }
    for architecture, given in defaults.items():
        explicit, omitted = (
            config_of(tmp_path, architecture, **values).canonical() for values in (given, {})
        )
        assert explicit == omitted, architecture


@pytest.mark.parametrize(
    ("architecture", "changes", "weights"),
    [
        pytest.param(
            MIXTRAL,
            {
                **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336},
                **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
            },
            46_702_792_704,
            id="Mixtral 8x7B",
        ),
        pytest.param(
            QWEN2,
            {
                **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24},
                **{"num_attention_heads": 16, "num_experts": 60, "moe_intermediate_size": 1408},
                **{"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
            },
            14_315_784_192,
            id="Qwen1.5-MoE-A2.7B",
        ),
        pytest.param(
            QWEN3,
            {
                **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48},
                **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
                **{"num_experts": 128, "moe_intermediate_size": 768},
            },
            30_532_122_624,
            id="Qwen3-30B-A3B",
        ),
        pytest.param(
            OLMOE,
            {
                **{"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024},
                **{"num_hidden_layers": 16, "num_attention_heads": 16, "num_experts": 64},
                "num_key_value_heads": 16,
            },
            6_919_161_856,
            id="OLMoE-1B-7B",
        ),
        pytest.param(
            GLM,
            {
                **{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944},
                **{"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8},
                **{"head_dim": 128, "n_routed_experts": 128, "moe_intermediate_size": 1408},
                "attention_bias": True,
            },
            106_852_251_264,
            id="GLM-4.5-Air",
        ),
    ],
)
def test_known_models_have_the_published_numbers_of_weights(
    tmp_path: Path, architecture: str, changes: dict[str, Any], weights: int
) -> None:
    assert count_weights(config_of(tmp_path, architecture, **changes)) == weights


def with_tensors(source: Path, folder: Path, more: dict[str, torch.Tensor]) -> Path:
    """A copy of a model with more tensors."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".*"))
    save_file({**load_file(folder / SINGLE_NAME), **more}, folder / SINGLE_NAME)
    return folder


def load(folder: Path) -> None:
    config, slots = read_config(folder), WeightSlots(torch.float32, torch.device("cpu"))
    build_model(config, slots)
    load_weights(folder, config, slots)


def test_layers_that_only_draft_tokens_are_not_loaded_and_not_in_the_fingerprint(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    source = tiny_model("glm4-moe")  # two layers, and one that drafts
    draft = {
        f"model.layers.2.{name}": torch.zeros(3)
        for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight", "shared_head.norm.weight")
    }
    folder = with_tensors(source, tmp_path / "draft", draft)
    load(folder)
    plain, drafting = (
        {each.name for each in tensor_digests(each, read_config(each))} for each in (source, folder)
    )
    assert plain == drafting
    other = with_tensors(source, tmp_path / "other", {"model.layers.3.x": torch.zeros(3)})
    with pytest.raises(WeightsError, match=r"no use for: model\.layers\.3\.x"):
        load(other)


def test_a_checkpoint_may_have_all_experts_of_a_layer_in_two_tensors(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    source, folder = tiny_model("mixtral-window-tied"), tmp_path / "fused"
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder, save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(folder / SINGLE_NAME)
    prompt = prompt_of(40, seed=8)
    [ids] = generate_ids(small_engine(folder), [prompt])
    compare(reference(source, prompt, 64, ids), ids, Tally())
    tensors = load_file(folder / SINGLE_NAME)
    del tensors["model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, folder / SINGLE_NAME)
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.1\.mlp\.experts\.down_proj"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.7.w3.weight"),
        ("qwen2-moe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("olmoe", "model.layers.1.self_attn.q_norm.weight"),
        ("glm4-moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_missing_tensor_of_the_experts_is_named(
    name: str, missing: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    folder = with_tensors(tiny_model(name), tmp_path / name, {})
    tensors = load_file(folder / SINGLE_NAME)
    del tensors[missing]
    save_file(tensors, folder / SINGLE_NAME)
    with pytest.raises(WeightsError, match=f"lacks {missing}"):
        load(folder)
