"""Names of tensors in GGUF files, and what Hugging Face checkpoints call them. No torch.

A tensor of all experts of a layer becomes one per expert, as in the checkpoints of most families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from baton_engine.config.model_config import ModelConfig
from baton_text.gguf.header import Tensor

WHOLE: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
PARTS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
EXPERTS: Mapping[str, str] = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
# Names that Mixtral has instead.
MIXTRAL = "MixtralForCausalLM"
MIXTRAL_PARTS: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
MOST_EXPERTS = 4096
# Computed from the config, or read with it.
UNUSED = frozenset({"rope_freqs.weight"})
# Endings of weights with one output, which files have without this dimension.
VECTORS = ("shared_expert_gate.weight",)
# Models whose files have the rows of q and k in another order: those that rope rotates together
# follow each other.
PAIRED = frozenset({"LlamaForCausalLM", MIXTRAL})
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)", re.ASCII)


def rotary_heads(name: str, config: ModelConfig) -> int | None:
    """The number of heads of a tensor of q or k, by its name in checkpoints, whose rows are in the
    order of PAIRED; None for all others."""
    if config.architecture not in PAIRED:
        return None
    layer = name.rpartition(".")[0]
    if layer.endswith(".q_proj"):
        return config.num_heads
    return config.num_kv_heads if layer.endswith(".k_proj") else None


def checkpoint_names(tensor: Tensor, architecture: str) -> list[str]:
    """The names that checkpoints of the architecture have for the parts of a tensor; its own if it
    is not known, so that errors show it."""
    found = _NAME.fullmatch(tensor.name)
    if found is None:
        return [tensor.name]
    layer, part, ending = found.groups()
    if layer is None:
        return [f"{WHOLE[part]}.{ending}" if part in WHOLE else tensor.name]
    named = (MIXTRAL_PARTS if architecture == MIXTRAL else {}).get(part)
    named = named or PARTS.get(part) or EXPERTS.get(part)
    if named is None:
        return [tensor.name]
    count = 1
    if part in EXPERTS:
        count = tensor.shape[0]
        if len(tensor.shape) != 3 or count > MOST_EXPERTS:
            return [tensor.name]
    return [f"model.layers.{layer}.{named.format(expert)}.{ending}" for expert in range(count)]
