"""What config.json and generation_config.json would say about the model of a GGUF file.

In: its metadata, and which tensors it has. Out: the values of config.json. How weights are
quantized is not among them: each tensor says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton_text.gguf.header import GgufError, Header, shown
from baton_text.gguf.metadata import Metadata

ARCHITECTURE = "general.architecture"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# All layers have these, or none.
QUERY_BIAS, GATE_BIAS = "blk.0.attn_q.bias", "blk.0.ffn_gate.bias"
TOKEN_IDS = ("bos", "eos", "eot", "eom")
# What ends an answer, and not only a text.
ENDS = ("eos", "eot", "eom")
PLAIN_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTIZED_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names of Hugging Face: the class, and that of the same architecture with experts."""

    model: str
    kind: str
    mixture: str = ""
    mixture_kind: str = ""
    # Whether the softmax of the chosen experts' weights is over these alone.
    normalized: bool = True


# By `general.architecture`.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", "MixtralForCausalLM", "mixtral"),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("", "", "Qwen2MoeForCausalLM", "qwen2_moe", normalized=False),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("", "", "Qwen3MoeForCausalLM", "qwen3_moe"),
}


def config_of(header: Header) -> dict[str, Any]:
    """The content of config.json. Raises GgufError."""
    metadata = Metadata(header)
    name = metadata.text(ARCHITECTURE)
    if name is None or name not in ARCHITECTURES:
        raise GgufError(
            f"{header.path}: {ARCHITECTURE} {shown(name)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    experts = metadata.integer(f"{name}.expert_count", 0, least=0)
    known = ARCHITECTURES[name]
    model, kind = (known.mixture, known.mixture_kind) if experts else (known.model, known.kind)
    if not model:
        raise GgufError(
            f"{header.path}: {name}.expert_count {experts} is not supported for this architecture"
        )
    values = {
        "architectures": [model],
        "model_type": kind,
        **_sizes(metadata, name),
        **_rope(metadata, name),
        **token_ids(metadata),
        "tie_word_embeddings": HEAD not in header.tensors,
        "dtype": _dtype(header),
    }
    if name == "llama":
        values["attention_bias"] = QUERY_BIAS in header.tensors
        values["mlp_bias"] = GATE_BIAS in header.tensors
    if experts:
        values |= _experts(metadata, name, experts, known)
    return values


def generation_of(header: Header) -> dict[str, Any]:
    """The content of generation_config.json. Raises GgufError."""
    return token_ids(Metadata(header))


def token_ids(metadata: Metadata) -> dict[str, Any]:
    ids = {
        name: metadata.integer(f"tokenizer.ggml.{name}_token_id", least=0)
        for name in TOKEN_IDS
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
    ends = list(dict.fromkeys(ids[name] for name in ENDS if name in ids))
    found: dict[str, Any] = {"bos_token_id": ids["bos"]} if "bos" in ids else {}
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def _sizes(metadata: Metadata, name: str) -> dict[str, Any]:
    header = metadata.header
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(f"{header.path} has no tensor {EMBEDDING} with two dimensions")
    heads = metadata.integer(f"{name}.attention.head_count")
    hidden = metadata.integer(f"{name}.embedding_length")
    whole = hidden // heads if hidden % heads == 0 else None
    size = metadata.integer(f"{name}.attention.key_length", whole)
    for part in ("attention.value_length", "rope.dimension_count"):
        if (other := metadata.integer(f"{name}.{part}", size)) != size:
            raise metadata.wrong(f"{name}.{part}", other, f"{size}, the size of a head")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": size,
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer(f"{name}.context_length"),
        "hidden_act": "silu",
    }


def _rope(metadata: Metadata, name: str) -> dict[str, Any]:
    here = f"{name}.rope.scaling"
    found: dict[str, Any] = {"rope_theta": metadata.number(f"{name}.rope.freq_base", 10000.0)}
    kind = metadata.text(f"{here}.type") or "none"
    if kind == "none":
        return found
    if kind not in ("linear", "yarn"):
        raise metadata.wrong(f"{here}.type", kind, "none, linear or yarn")
    scaling = {"rope_type": kind, "factor": metadata.number(f"{here}.factor")}
    if kind == "yarn":
        original = metadata.integer(f"{here}.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return found | {"rope_scaling": scaling}


def _experts(metadata: Metadata, name: str, experts: int, known: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_experts_per_tok": metadata.integer(f"{name}.expert_used_count"),
    }
    if known.mixture_kind == "mixtral":
        return values | {"num_local_experts": experts}
    values["num_experts"] = experts
    values["moe_intermediate_size"] = metadata.integer(f"{name}.expert_feed_forward_length")
    values["norm_topk_prob"] = known.normalized
    if known.mixture_kind == "qwen2_moe":
        size = metadata.integer(f"{name}.expert_shared_feed_forward_length")
        values["shared_expert_intermediate_size"] = size
    return values


def _dtype(header: Header) -> str:
    """That of most plain weights, if there are no others. Norms are float32 in any case."""
    counts: dict[str, int] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + tensor.end - tensor.begin
    if counts.keys() - PLAIN_DTYPES.keys():
        return QUANTIZED_DTYPE
    return PLAIN_DTYPES[max(counts, key=lambda kind: counts[kind])] if counts else "float32"
