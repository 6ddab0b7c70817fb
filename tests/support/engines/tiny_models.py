"""Random tiny models, saved by transformers with a tokenizer as complete model folders.

In: a name. Out: a folder in the test cache, built on first use and the same in every run (seeded).
Weights are redrawn with std 0.1-0.3: with transformers' 0.02 a tied model repeats one id and
ignores its KV, and a test of exactness would pass with any cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parents[3] / ".pytest_cache" / "baton"
RECIPE = 1  # increase it when this file builds different folders from the same specs

VOCAB = 320
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|spare|>")
FIRST_SPECIAL = VOCAB - len(SPECIALS)
MAX_POSITIONS = 1024
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The training text of the tokenizer's merges.
TEXT = (
    "the prefill node computes the prompt and the decode node generates the answer; ",
    "every chunk of the cache has a name, and a name is enough to find it again. ",
    "tokens known and tokens computed: a node closes the gap between them, always. ",
)


@dataclass(frozen=True)
class Tiny:
    """One model: the model_type of a transformers config, its values, and the weights' std. The
    embedding of a model that scales it needs a smaller std than the other weights."""

    kind: str
    std: float
    values: dict[str, Any] = field(default_factory=dict)
    embed_std: float | None = None


def _sizes(heads: int, kv_heads: int, hidden: int = 64, layers: int = 2) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
}
# The factors of 6 frequencies. With `original_max_position_embeddings` of 1, transformers uses the
# long ones in every sequence, and with MAX_POSITIONS the short ones.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.25, 1.5, 1.75, 2.0],
    "long_factor": [1.0, 2.0, 4.5, 8.0, 16.0, 30.0],
}

# Together they cover Llama, Qwen3, Mistral, Phi-3, Gemma 2 and gpt-oss; GQA 1, 2 and 4; tied and
# untied embeddings; bias; head_dim other than hidden / heads; Llama 3 rope scaling; partial rope;
# soft caps; sinks; experts; and windows, in all layers and in every other, that are shorter than
# most prompts and not a multiple of the block size.
TINY_MODELS: dict[str, Tiny] = {
    "llama-gqa1": Tiny("llama", 0.15, _sizes(4, 4, layers=3)),
    "llama-gqa2-tied": Tiny("llama", 0.2, {**_sizes(4, 2), "tie_word_embeddings": True}),
    "llama-gqa4": Tiny(
        "llama", 0.25, {**_sizes(4, 1), "attention_bias": True, "mlp_bias": True, "head_dim": 24}
    ),
    "llama3-rope": Tiny("llama", 0.2, {**_sizes(4, 2, layers=3), "rope_parameters": LLAMA3_ROPE}),
    "qwen3-gqa2": Tiny("qwen3", 0.3, {**_sizes(4, 2), "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-gqa4": Tiny("qwen3", 0.15, {**_sizes(8, 2, hidden=96), "head_dim": 16}),
    "mistral-window": Tiny("mistral", 0.2, {**_sizes(4, 2), "sliding_window": 40}),
    "phi3-partial-window": Tiny(
        "phi3",
        0.2,
        {
            **_sizes(4, 2),
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "gemma2": Tiny(
        "gemma2",
        0.2,
        {
            **_sizes(4, 2),
            "head_dim": 24,
            "sliding_window": 40,
            "query_pre_attn_scalar": 20,
            # Low enough to change most scores and logits.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        embed_std=0.03,
    ),
    # A window in the first layer and sinks in both; the default rope is yarn.
    "gpt-oss": Tiny(
        "gpt_oss",
        0.2,
        {
            **_sizes(4, 2),
            "head_dim": 32,
            "sliding_window": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
}
# More families and settings, for the engine's own tests.
MORE_MODELS: dict[str, Tiny] = {
    "phi3": Tiny("phi3", 0.25, {**_sizes(4, 4, layers=3), "tie_word_embeddings": True}),
    "phi3-short-rope": Tiny(
        "phi3",
        0.2,
        {
            **_sizes(4, 1),
            "original_max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {**LONGROPE, "factor": 4.0},
        },
    ),
    "phi3-long-rope": Tiny(
        "phi3",
        0.2,
        {
            **_sizes(4, 2),
            "original_max_position_embeddings": 1,
            "rope_parameters": {**LONGROPE, "attention_factor": 1.2},
        },
    ),
    # The real head_dim, no soft caps, and windows in other layers than by default.
    "gemma2-wide-heads": Tiny(
        "gemma2",
        0.2,
        {
            **_sizes(2, 1, layers=3),
            "head_dim": 256,
            "sliding_window": 32,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        embed_std=0.03,
    ),
    "gemma2-bias": Tiny(
        "gemma2",
        0.2,
        {
            **_sizes(8, 2, hidden=96, layers=4),
            "head_dim": 16,
            "attention_bias": True,
            "attn_logit_softcapping": 5.0,
        },
        embed_std=0.03,
    ),
    "qwen2": Tiny("qwen2", 0.2, {**_sizes(4, 2), "tie_word_embeddings": True}),
    "qwen2-mha-head40": Tiny("qwen2", 0.15, _sizes(3, 3, hidden=120)),
    "llama-head64": Tiny("llama", 0.2, {**_sizes(4, 2), "head_dim": 64}),
    "qwen3-head128": Tiny("qwen3", 0.2, {**_sizes(4, 2), "head_dim": 128}),
    "mistral": Tiny("mistral", 0.2, {**_sizes(4, 2), "head_dim": 24, "sliding_window": None}),
    # A window in one layer of two.
    "qwen3-window": Tiny(
        "qwen3",
        0.2,
        {
            **_sizes(4, 2),
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 32,
            "max_window_layers": 1,
        },
    ),
    "qwen3-bias-linear-rope": Tiny(
        "qwen3",
        0.2,
        {
            **_sizes(4, 1),
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
    ),
}


def _experts(count: int, top_k: int, size: int = 48) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": size}


def _glm(count: int, top_k: int, rotated: float = 0.5) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotated}
    experts = _experts(count, top_k)
    return {**experts, "n_routed_experts": experts.pop("num_experts"), "rope_parameters": rope}


def _latent(rank: int, rope: int, key: int, value: int, query: int | None) -> dict[str, Any]:
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key,
        "v_head_dim": value,
        "q_lora_rank": query,
        "num_key_value_heads": 4,
    }


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "mscale": mscale,
        "mscale_all_dim": 0.7,
    }


# Mixtures of experts: normalised weights and not; odd numbers of experts; layers without experts;
# a shared MLP with and without a gate; groups of experts. DeepSeek's keep latent rows, of sizes
# that compiled kernels read in place or that are copied first, with and without a latent of q.
EXPERT_MODELS: dict[str, Tiny] = {
    "mixtral": Tiny("mixtral", 0.2, {**_sizes(4, 2), "num_local_experts": 8}),
    "mixtral-window-tied": Tiny(
        "mixtral",
        0.2,
        {
            **_sizes(4, 4),
            "head_dim": 24,
            "num_local_experts": 3,
            "sliding_window": 40,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-gqa4-odd": Tiny(
        "mixtral",
        0.15,
        {**_sizes(4, 1, layers=3), "num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "qwen2-moe": Tiny(
        "qwen2_moe",
        0.2,
        {**_sizes(4, 2), **_experts(4, 2), "shared_expert_intermediate_size": 80},
    ),
    # Experts in layers 1 and 3, windows in layers 0 and 2.
    "qwen2-moe-window-tied": Tiny(
        "qwen2_moe",
        0.2,
        {
            **_sizes(4, 2, layers=4),
            **_experts(6, 2, size=32),
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 40,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-moe-one-of-7": Tiny(
        "qwen2_moe",
        0.15,
        {
            **_sizes(3, 3, hidden=120, layers=3),
            **_experts(7, 1),
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
            "qkv_bias": False,
        },
    ),
    "qwen3-moe": Tiny(
        "qwen3_moe",
        0.2,
        {**_sizes(4, 2), **_experts(8, 2), "head_dim": 32, "norm_topk_prob": True},
    ),
    "qwen3-moe-bias-odd": Tiny(
        "qwen3_moe",
        0.2,
        {
            **_sizes(4, 4, layers=3),
            **_experts(5, 3),
            "attention_bias": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe-window": Tiny(
        "qwen3_moe",
        0.2,
        {
            **_sizes(8, 2, hidden=96),
            **_experts(4, 1, size=64),
            "head_dim": 16,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 40,
        },
    ),
    "olmoe": Tiny("olmoe", 0.2, {**_sizes(4, 4), "num_experts": 8, "num_experts_per_tok": 2}),
    "olmoe-clip-tied": Tiny(
        "olmoe",
        0.2,
        {
            **_sizes(4, 2),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "clip_qkv": 1.0,  # a third of all numbers are beyond it
            "tie_word_embeddings": True,
        },
    ),
    "olmoe-bias-odd": Tiny(
        "olmoe",
        0.15,
        {
            **_sizes(4, 1, layers=3),
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "attention_bias": True,
        },
    ),
    "glm4-moe": Tiny(
        "glm4_moe",
        0.2,
        {
            **_sizes(4, 2),
            **_glm(8, 2),
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4-moe-groups-tied": Tiny(
        "glm4_moe",
        0.2,
        {
            **_sizes(4, 1),
            **_glm(8, 3, rotated=0.75),
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v2-lite": Tiny(
        "deepseek_v2",
        0.2,
        {
            **_sizes(4, 4),
            **_latent(32, 32, 16, 24, None),
            **_glm(6, 2),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "n_shared_experts": 1,
        },
    ),
    "deepseek-v2-groups": Tiny(
        "deepseek_v2",
        0.2,
        {
            **_sizes(4, 4, layers=3),
            **_latent(24, 8, 20, 28, 40),
            **_glm(8, 3),
            "rope_parameters": _yarn(0.7),
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
    ),
    # Layers without experts first; unlike the others, a bias of the latent, and tied.
    "deepseek-v2-dense-bias-tied": Tiny(
        "deepseek_v2",
        0.2,
        {
            **_sizes(4, 4, hidden=96, layers=3),
            **_latent(20, 12, 8, 12, None),
            **_glm(5, 1),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "attention_bias": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v3": Tiny(
        "deepseek_v3",
        0.2,
        {
            **_sizes(4, 4, layers=3),
            **_latent(64, 32, 32, 32, 48),
            **_glm(8, 2),
            "rope_parameters": _yarn(1.0),
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek-v3-halves-bias-tied": Tiny(
        "deepseek_v3",
        0.2,
        {
            **_sizes(4, 4),
            **_latent(40, 16, 12, 20, None),
            **_glm(4, 1),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
    ),
    # Windows in other layers than by default, and a gate that is clamped often.
    "gpt-oss-gqa4": Tiny(
        "gpt_oss",
        0.25,
        {
            **_sizes(8, 2, hidden=96, layers=3),
            "head_dim": 16,
            "sliding_window": 33,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.2,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "gpt-oss-one-expert": Tiny(
        "gpt_oss",
        0.2,
        {
            **_sizes(4, 4),
            "head_dim": 24,
            "intermediate_size": 40,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "deepseek-v3-three-groups": Tiny(
        "deepseek_v3",
        0.15,
        {
            **_sizes(4, 4, hidden=96, layers=3),
            **_latent(28, 8, 24, 40, 36),
            **_glm(9, 4),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
        },
    ),
    "glm4-moe-dense-odd": Tiny(
        "glm4_moe",
        0.15,
        {
            **_sizes(4, 4, layers=3),
            **_glm(5, 4, rotated=1.0),
            "head_dim": 24,
            "first_k_dense_replace": 2,
        },
    ),
}
# TINY_MODELS, the models of families that are not among them, and all with experts.
EACH_FAMILY = (
    *TINY_MODELS,
    *(
        name
        for name, each in MORE_MODELS.items()
        if each.kind not in {tiny.kind for tiny in TINY_MODELS.values()}
    ),
    *EXPERT_MODELS,
)
# Architectures without a family here, which transformers' code computes.
BRIDGE_MODELS: dict[str, Tiny] = {
    # Learned positions; tied; products whose weights are transposed in the checkpoint.
    "gpt2": Tiny("gpt2", 0.2, {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    # Learned positions with an offset, ReLU, biases.
    "opt": Tiny("opt", 0.2, {**_sizes(4, 4), "ffn_dim": 128, "word_embed_proj_dim": 64}),
    # Parallel residuals, partial rope, one tensor for q, k and v, another name of the head.
    "gpt-neox": Tiny("gpt_neox", 0.2, {**_sizes(4, 4), "rotary_pct": 0.5}),
    # Parallel residuals behind one LayerNorm, a head with a bias.
    "phi": Tiny("phi", 0.2, _sizes(4, 2)),
    # Parallel residuals, LayerNorm without bias, scaled logits, interleaved rope.
    "cohere": Tiny("cohere", 0.2, {**_sizes(4, 2), "logit_scale": 0.25}),
    # The same with windows in three layers of four, and no rope in the fourth.
    "cohere2": Tiny("cohere2", 0.2, {**_sizes(4, 2, layers=4), "sliding_window": 40}),
    # LayerNorm, partial rope.
    "stablelm": Tiny("stablelm", 0.2, _sizes(4, 2)),
    # LayerNorm, biases, a window in each layer, one MLP without a gate.
    "starcoder2": Tiny("starcoder2", 0.2, {**_sizes(4, 1), "sliding_window": 40}),
    # One head of keys and values for all heads of queries.
    "gpt-bigcode": Tiny("gpt_bigcode", 0.2, {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    # Norms of 1 + weight, scaled embeddings, large heads.
    "gemma": Tiny("gemma", 0.2, {**_sizes(4, 1), "head_dim": 32}, embed_std=0.03),
    # Two ropes, windows in all layers but one, norms of q and k.
    "gemma3": Tiny(
        "gemma3_text",
        0.2,
        {
            **_sizes(4, 2, layers=3),
            "head_dim": 24,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        embed_std=0.03,
    ),
    # Norms after attention and MLP, norms of all of q and k.
    "olmo2": Tiny("olmo2", 0.2, _sizes(4, 2)),
    # Multipliers of embeddings, residuals, scores and logits.
    "granite": Tiny(
        "granite",
        0.2,
        {
            **_sizes(4, 2),
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    # Rope in three layers of four.
    "smollm3": Tiny("smollm3", 0.2, _sizes(4, 2, layers=4)),
    # Interleaved rope in pairs.
    "ernie4.5": Tiny("ernie4_5", 0.2, _sizes(4, 2)),
    "helium": Tiny("helium", 0.2, {**_sizes(4, 2), "head_dim": 16}),
    # Values of another head size than keys.
    "minicpm3": Tiny(
        "minicpm3",
        0.2,
        {
            **_sizes(4, 4),
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    # Layers without a window have fewer and larger heads of keys and values, which are alike.
    "gemma4": Tiny(
        "gemma4_text",
        0.2,
        {
            **_sizes(4, 2, layers=3),
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        embed_std=0.03,
    ),
    # Heads of two sizes, layers that use the keys and values of earlier ones, and no window.
    "gemma4-shared": Tiny(
        "gemma4_text",
        0.2,
        {
            **_sizes(4, 2, layers=4),
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
            "sliding_window": MAX_POSITIONS,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        embed_std=0.03,
    ),
    # Layers have different numbers of query heads; experts.
    "laguna": Tiny(
        "laguna",
        0.2,
        {
            **_sizes(4, 2, layers=3),
            "head_dim": 16,
            "num_attention_heads_per_layer": [4, 8, 4],
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    # Experts, whose checkpoint has other tensors than the model.
    "phimoe": Tiny(
        "phimoe", 0.2, {**_sizes(4, 2), "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
}


# Sizes that are multiples of 256, for weights in blocks of 256 inputs.
WIDE_MODELS: dict[str, Tiny] = {"llama-wide": Tiny("llama", 0.08, _sizes(4, 2, hidden=256))}


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """`length` random ids without special tokens; equal arguments give equal ids."""
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(FIRST_SPECIAL) for _ in range(length)]


def make_tiny_model(name: str, root: Path = CACHE) -> Path:
    """Return the folder of model `name`, built if it is missing. Safe in parallel processes."""
    spec = {**TINY_MODELS, **MORE_MODELS, **EXPERT_MODELS, **BRIDGE_MODELS, **WIDE_MODELS}[name]
    import transformers

    key = json.dumps([RECIPE, transformers.__version__, name, asdict(spec)], sort_keys=True)
    folder = root / hashlib.sha256(key.encode()).hexdigest()[:12] / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    try:
        _save_model(spec, draft, seed=name)
        _save_tokenizer(draft)
        draft.chmod(0o755)
        os.rename(draft, folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not folder.is_dir():  # otherwise another process was faster
            raise
    return folder


def with_other_weights(folder: Path) -> Path:
    """The folder of a model like the one in `folder`, with smaller weights; made if missing."""
    import torch
    from safetensors.torch import load_file, save_file

    other = folder.parent / f"{folder.name}-other"
    if other.is_dir():
        return other
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    shutil.copytree(folder, draft, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    weights = draft / "model.safetensors"
    with torch.no_grad():
        tensors = {name: 0.9 * tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    draft.chmod(0o755)
    try:
        os.rename(draft, other)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not other.is_dir():  # otherwise another process was faster
            raise
    return other


def _save_model(spec: Tiny, folder: Path, *, seed: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        spec.kind,
        vocab_size=VOCAB,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=FIRST_SPECIAL,
        eos_token_id=[FIRST_SPECIAL + 1, FIRST_SPECIAL + 4],
        pad_token_id=FIRST_SPECIAL + 2,
        **spec.values,
    )
    make = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    noise = torch.Generator().manual_seed(random.Random(seed).getrandbits(32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            center = 1.0 if norm else 0.0
            std = spec.embed_std if spec.embed_std and "embed_tokens" in name else spec.std
            parameter.normal_(center, std, generator=noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, spec.std, generator=noise)
    model.generation_config.eos_token_id = [FIRST_SPECIAL + 1, FIRST_SPECIAL + 4]
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    if tokenizer.get_vocab_size() != VOCAB:
        raise AssertionError(f"the tokenizer has {tokenizer.get_vocab_size()} ids, not {VOCAB}")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[4],
        "pad_token": SPECIALS[2],
        "model_max_length": MAX_POSITIONS,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
