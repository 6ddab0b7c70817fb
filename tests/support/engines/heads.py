"""Random heads that draft from hidden states, in the formats of their checkpoints, and the same
heads in plain torch.

In: the folder of a target, and a method. Out: a folder for --speculative-config, or what a head
drafts after some tokens, computed at once from the hidden states of all of them, without a cache.

Shapes: T positions, D hidden size, C numbers that the target returns of a token, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
MEDUSA_HEADS = 4
DRAFT_VOCAB = 200
STD = 0.2


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def save_head(folder: Path, values: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_head(method: str, target: Path, folder: Path) -> Path:
    """A head of random numbers for the Llama model in `target`."""
    values, noise = config_of(target), torch.Generator().manual_seed(7)
    size, vocab, inner = values["hidden_size"], values["vocab_size"], values["intermediate_size"]

    def random(*shape: int) -> torch.Tensor:
        center = 1.0 if len(shape) == 1 else 0.0
        return center + STD * torch.randn(shape, generator=noise)

    if method == "medusa":
        tensors: Tensors = {}
        for head in range(MEDUSA_HEADS):
            tensors[f"{head}.0.linear.weight"] = random(size, size)
            tensors[f"{head}.0.linear.bias"] = random(size) - 1
            tensors[f"{head}.1.weight"] = random(vocab, size)
        medusa = {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1}
        return save_head(folder, medusa, tensors)
    layer, wide = ("midlayer", 2 * size) if method == "eagle3" else ("layers.0", size)
    heads = values["num_attention_heads"]
    width = size // heads
    tensors = {
        f"{layer}.self_attn.q_proj.weight": random(size, wide),
        f"{layer}.self_attn.k_proj.weight": random(2 * width, wide),
        f"{layer}.self_attn.v_proj.weight": random(2 * width, wide),
        f"{layer}.self_attn.o_proj.weight": random(size, size),
        f"{layer}.mlp.gate_proj.weight": random(inner, size),
        f"{layer}.mlp.up_proj.weight": random(inner, size),
        f"{layer}.mlp.down_proj.weight": random(size, inner),
        f"{layer}.post_attention_layernorm.weight": random(size),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        **{key: values[key] for key in ("hidden_size", "intermediate_size", "vocab_size")},
        **{"num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": 2},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float32"},
    }
    if method == "eagle":
        tensors |= {"fc.weight": random(size, 2 * size), "fc.bias": random(size) - 1}
        tensors["embed_tokens.weight"] = random(vocab, size)  # the target's is used
        return save_head(folder, config, tensors)
    ids = torch.randperm(vocab, generator=noise)[:DRAFT_VOCAB].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    tensors |= {
        "fc.weight": random(size, 3 * size),
        "midlayer.hidden_norm.weight": random(size),
        "midlayer.input_layernorm.weight": random(size),
        "norm.weight": random(size),
        "lm_head.weight": random(DRAFT_VOCAB, size),
        "embed_tokens.weight": random(vocab, size),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": known,
    }
    return save_head(folder, {**config, "draft_vocab_size": DRAFT_VOCAB}, tensors)


def with_mtp_layer(target: Path, folder: Path) -> Path:
    """A copy of the model in `target` with a further layer that drafts, like its last one."""
    values, noise = config_of(target), torch.Generator().manual_seed(9)
    last = values["num_hidden_layers"] - 1
    old, new = f"model.layers.{last}.", f"model.layers.{last + 1}."
    size, vocab = values["hidden_size"], values["vocab_size"]
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns(".*"))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith(old)]:
        noisy = torch.randn(tensors[name].shape, generator=noise)
        tensors[name.replace(old, new)] = tensors[name] + 0.3 * noisy
    more = {
        "eh_proj.weight": (size, 2 * size),
        **{f"{name}.weight": (size,) for name in ("enorm", "hnorm", "shared_head.norm")},
        **{f"{name}.weight": (vocab, size) for name in ("embed_tokens", "shared_head.head")},
    }
    for name, shape in more.items():
        center = 1.0 if len(shape) == 1 else 0.0
        tensors[new + name] = center + STD * torch.randn(shape, generator=noise)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# --- the same in plain torch ----------------------------------------------------------------------


@dataclass(frozen=True)
class Twin:
    """A head that computes all positions at once. `forward` takes the states of positions 0 to
    T - 1 and the tokens after them, and returns what logits are made of, and the next states."""

    states: Callable[[torch.Tensor], torch.Tensor]
    forward: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    logits: Callable[[torch.Tensor], torch.Tensor]

    def drafts(self, hidden_TC: torch.Tensor, tokens: Sequence[int], count: int) -> list[int]:
        """Greedy drafts after these tokens, from the hidden states of all but the last."""
        states_TD, known = self.states(hidden_TC[: len(tokens) - 1]), [*tokens]
        for _ in range(count):
            out_TD, next_TD = self.forward(states_TD, torch.tensor(known[1:]))
            known.append(int(self.logits(out_TD[-1:]).argmax()))
            states_TD = torch.cat((states_TD, next_TD[-1:]))
        return known[len(tokens) :]


def norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    return x_TD * (x_TD.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight_D


def attend(
    x_TE: torch.Tensor, tensors: Tensors, name: str, heads: int, kv_heads: int
) -> torch.Tensor:
    count = len(x_TE)
    q_NTH, k_KTH, v_KTH = (
        (x_TE @ tensors[f"{name}.{part}_proj.weight"].T).view(count, number, -1).transpose(0, 1)
        for part, number in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    width = q_NTH.shape[-1]
    turns = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles_TH = (torch.arange(count)[:, None] * turns).repeat(1, 2)

    def rotated(x_NTH: torch.Tensor) -> torch.Tensor:
        low, high = x_NTH.chunk(2, -1)
        return x_NTH * angles_TH.cos() + torch.cat((-high, low), -1) * angles_TH.sin()

    k_NTH, v_NTH = (each.repeat_interleave(heads // kv_heads, 0) for each in (k_KTH, v_KTH))
    out_NTH = F.scaled_dot_product_attention(rotated(q_NTH), rotated(k_NTH), v_NTH, is_causal=True)
    return out_NTH.transpose(0, 1).reshape(count, -1) @ tensors[f"{name}.o_proj.weight"].T


def gated(x_TD: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    gate, up, down = (tensors[f"{name}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    return (F.silu(x_TD @ gate) * (x_TD @ up)) @ down


def twin_of(method: str, target: Path, head: Path) -> Twin:
    """The twin of a head of make_head()."""
    values, own = config_of(target), load_file(head / "model.safetensors")
    theirs = load_file(target / "model.safetensors")
    embed_VD = theirs["model.embed_tokens.weight"]
    head_VD = theirs.get("lm_head.weight", embed_VD)
    size, eps, heads = values["hidden_size"], values["rms_norm_eps"], values["num_attention_heads"]

    def normed(hidden_TC: torch.Tensor) -> torch.Tensor:
        return norm(hidden_TC[:, :size], theirs["model.norm.weight"], eps)

    def eagle(states_TD: torch.Tensor, tokens_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat((embed_VD[tokens_T], states_TD), 1)
        x_TD = both @ own["fc.weight"].T + own["fc.bias"]
        x_TD = x_TD + attend(x_TD, own, "layers.0.self_attn", heads, 2)
        y_TD = norm(x_TD, own["layers.0.post_attention_layernorm.weight"], 1e-5)
        x_TD = x_TD + gated(y_TD, own, "layers.0.mlp")
        return x_TD, x_TD

    def eagle3(
        states_TD: torch.Tensor, tokens_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = own["embed_tokens.weight"][tokens_T]
        wide = torch.cat(
            (
                norm(embedded, own["midlayer.input_layernorm.weight"], 1e-5),
                norm(states_TD, own["midlayer.hidden_norm.weight"], 1e-5),
            ),
            1,
        )
        x_TD = states_TD + attend(wide, own, "midlayer.self_attn", heads, 2)
        y_TD = norm(x_TD, own["midlayer.post_attention_layernorm.weight"], 1e-5)
        x_TD = x_TD + gated(y_TD, own, "midlayer.mlp")
        return x_TD, x_TD

    def eagle3_logits(x_TD: torch.Tensor) -> torch.Tensor:
        small = norm(x_TD, own["norm.weight"], 1e-5) @ own["lm_head.weight"].T
        logits = torch.full((len(x_TD), len(embed_VD)), -torch.inf)
        logits[:, own["d2t"] + torch.arange(DRAFT_VOCAB)] = small
        return logits

    if method == "eagle":
        return Twin(normed, eagle, lambda x_TD: x_TD @ head_VD.T)
    return Twin(lambda hidden_TC: hidden_TC[:, size:] @ own["fc.weight"].T, eagle3, eagle3_logits)


def medusa_drafts(
    target: Path, head: Path, hidden_TC: torch.Tensor, tokens: Sequence[int], count: int
) -> list[int]:
    own, theirs = load_file(head / "model.safetensors"), load_file(target / "model.safetensors")
    last_1D = hidden_TC[len(tokens) - 2 : len(tokens) - 1]
    x_1D = norm(last_1D, theirs["model.norm.weight"], config_of(target)["rms_norm_eps"])
    ids = []
    for number in range(count):
        inner = x_1D @ own[f"{number}.0.linear.weight"].T + own[f"{number}.0.linear.bias"]
        ids.append(int(((x_1D + F.silu(inner)) @ own[f"{number}.1.weight"].T).argmax()))
    return ids


def mtp_twin(target: Path, draft: Path) -> Twin:
    """The twin of a model of with_mtp_layer(): transformers computes the layer, in a model of one
    more layer, which is written to the folder `draft`."""
    import transformers

    values, tensors = config_of(target), load_file(target / "model.safetensors")
    count, size, eps = values["num_hidden_layers"], values["hidden_size"], values["rms_norm_eps"]
    new = f"model.layers.{count}."
    own = ("eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(tuple(new + part for part in own))
    }
    save_head(draft, {**values, "num_hidden_layers": count + 1}, kept)
    model = transformers.AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    inner = model.model
    embed_VD = tensors["model.embed_tokens.weight"]
    head_VD = tensors.get("lm_head.weight", embed_VD)

    def forward(
        states_TD: torch.Tensor, tokens_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (
            norm(embed_VD[tokens_T], tensors[f"{new}enorm.weight"], eps),
            norm(states_TD, tensors[f"{new}hnorm.weight"], eps),
        )
        x_1TD = (torch.cat(parts, 1) @ tensors[f"{new}eh_proj.weight"].T)[None]
        positions = torch.arange(len(tokens_T))[None]
        mask = torch.full((len(tokens_T),) * 2, -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            out = inner.layers[count](
                x_1TD,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=inner.rotary_emb(x_1TD, positions),
            )
        out_TD = out[0] if isinstance(out, tuple) or out.dim() == 3 else out
        normed = norm(out_TD, tensors[f"{new}shared_head.norm.weight"], eps)
        return normed, normed

    return Twin(
        lambda hidden_TC: norm(hidden_TC[:, :size], tensors["model.norm.weight"], eps),
        forward,
        lambda x_TD: x_TD @ head_VD.T,
    )
