"""GGUF files of tiny models, written with the package gguf, which also says what their numbers are.

Blocks of quantized tensors of tiny models have random codes and scales. Names of tensors come from
the package's own table.

Shapes: O and I a linear's output and input size, E experts, R rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from tests.support.engines.quantized.gguf_rounding import rounded_blocks, type_for
from tests.support.engines.quantized.quantized_models import WEIGHTS, QuantizedModel
from tests.support.engines.tiny_models import CACHE, make_tiny_model

RECIPE = 2  # increase it when this module writes different files
FILE = "model.gguf"
Raw = npt.NDArray[np.uint8]
# Type of blocks -> the places of their float16 numbers, and the value of the second one per value
# of the first that gives numbers of both signs.
# A tensor's type, numbers [R, I] and name -> its blocks.
Blocks = Callable[[str, torch.Tensor, str], Raw]
FLOATS: Mapping[str, tuple[int, int | None, float]] = {
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_0": (0, None, 0.0),
    "Q4_1": (0, 2, -7.5),
    "Q4_K": (0, 2, 7.5),
    "Q5_0": (0, None, 0.0),
    "Q5_1": (0, 2, -15.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "Q8_0": (0, None, 0.0),
}
# The type of most tensors of a file, and those of others by the ends of their names.
MIXES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    **{kind: (kind, {}) for kind in (*FLOATS, "F16", "BF16", "F32")},
    **{
        f"{kind}, embedding in Q8_0": (kind, {"token_embd.weight": "Q8_0"})
        for kind in ("Q4_0", "Q4_K", "Q6_K", "Q8_0")
    },
    "demo": ("Q4_1", {"token_embd.weight": "Q8_0"}),
    # As llama.cpp mixes types, and all that have blocks of 256 inputs.
    "Q4_K_M": (
        "Q4_K",
        {
            **dict.fromkeys(("token_embd.weight", "output.weight", "attn_v.weight"), "Q6_K"),
            **{"0.ffn_down.weight": "Q5_K", "attn_output.weight": "Q2_K"},
            "ffn_up.weight": "Q3_K",
        },
    ),
    "Q4_0 and plain": (
        "Q4_0",
        {"token_embd.weight": "F16", "output.weight": "BF16", "attn_k.weight": "F32"},
    ),
}


@dataclass(frozen=True)
class Writing:
    """How tensors become those of a file."""

    mix: str
    blocks: Blocks


EXPERT_PARTS: Mapping[str, str] = {
    **{"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"},
    **{"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
}


def make_gguf(model: str, mix: str, root: Path = CACHE) -> QuantizedModel:
    """The tiny model `model` as a file with types of MIXES, and as a plain folder with the same
    numbers. Safe in parallel processes."""
    source = make_tiny_model(model, root)
    key = hashlib.sha256(f"{RECIPE} {gguf.__name__} {source}".encode()).hexdigest()[:12]
    place = root / f"{key}-gguf-{mix.replace(' ', '-')}"
    if not place.is_dir():
        draft = Path(tempfile.mkdtemp(dir=root, prefix=".draft-"))
        plain = write_gguf(source, draft / FILE, mix, _random)
        shutil.copytree(source, draft / "plain", ignore=shutil.ignore_patterns(".*", WEIGHTS))
        save_file(plain, draft / "plain" / WEIGHTS)
        try:
            os.rename(draft, place)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not place.is_dir():  # otherwise another process was faster
                raise
    return QuantizedModel(place / FILE, place / "plain")


def _random(kind: str, x_RI: torch.Tensor, name: str) -> Raw:
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    rows, inputs = x_RI.shape
    return random_blocks(kind, rows, inputs, float(x_RI.std()), seed)


def nearest(kind: str, x_RI: torch.Tensor, name: str) -> Raw:
    """The blocks whose numbers are the nearest."""
    return rounded_blocks(kind, x_RI.numpy())


def random_blocks(kind: str, rows: int, inputs: int, std: float, seed: int) -> Raw:
    """Rows [R, bytes] of blocks that stand for numbers of this standard deviation."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    first, second, ratio = FLOATS[kind]
    scales = rng.uniform(0.5, 1.5, raw.shape[:2]).astype(np.float32)

    def store(factor: float) -> None:
        for at, values in ((first, scales), (second, scales * ratio)):
            if at is not None:
                octets = (values * factor).astype(np.float16)[..., None].view(np.uint8)
                raw[..., at : at + 2] = octets

    store(1.0)
    store(std / float(numbers_of_blocks(kind, raw.reshape(rows, -1)).std()))
    return raw.reshape(rows, -1)


def numbers_of_blocks(kind: str, raw: Raw) -> npt.NDArray[np.float32]:
    """As the package dequantizes them."""
    numbers: npt.NDArray[np.float32] = dequantize(raw, gguf.GGMLQuantizationType[kind])
    return numbers


def write_gguf(source: Path, file: Path, mix: str, blocks: Blocks) -> dict[str, torch.Tensor]:
    """Write the model of a folder with types of MIXES. Returns its numbers as tensors of a plain
    folder."""
    config = json.loads((source / "config.json").read_text())
    architecture = config["model_type"].replace("_", "")
    if architecture == "mixtral":
        architecture = "llama"
    writer = gguf.GGUFWriter(file, architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, source, config)
    tensors = load_file(source / WEIGHTS)
    plain = _add_tensors(writer, tensors, config, architecture, Writing(mix, blocks))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


def _add_config(writer: Any, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, size))
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _llama3_factors(rope: Mapping[str, Any], size: int) -> npt.NDArray[np.float32]:
    """By what Llama 3 divides each frequency."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float64] = 1 / (kept + (1 - kept) / rope["factor"])
    return factors.astype(np.float32)


def _add_tokenizer(writer: Any, source: Path, config: Mapping[str, Any]) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    vocab = dict(tokenizer["model"]["vocab"])
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    vocab |= {text: index for index, text in special.items()}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = [
        each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]
    ]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if "Digits" in str(tokenizer["pre_tokenizer"]) else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [control if index in special else normal for index in range(len(tokens))]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    ends = config["eos_token_id"]
    first, *others = ends if isinstance(ends, list) else [ends]
    writer.add_eos_token_id(first)
    for other in others:
        writer.add_eot_token_id(other)
    writer.add_pad_token_id(config["pad_token_id"])
    template = source / "chat_template.jinja"
    writer.add_chat_template(
        template.read_text() if template.exists() else settings["chat_template"]
    )


def _add_tensors(
    writer: Any,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    architecture: str,
    writing: Writing,
) -> dict[str, torch.Tensor]:
    """Returns the same numbers as tensors of a plain folder."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    plain: dict[str, torch.Tensor] = {}
    experts: dict[str, list[str]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _numbered(item[0])):
        if ".experts." in name:
            part = EXPERT_PARTS[name.split(".")[-2]]
            experts.setdefault(f"blk.{name.split('.')[2]}.{part}.weight", []).append(name)
            continue
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        order = _order(name, tensor, config) if architecture == "llama" else None
        if order is not None:
            back = np.argsort(order)
            plain[name] = _add(writer, place, tensor[order], writing)[back].contiguous()
        elif name.endswith("shared_expert_gate.weight"):
            plain[name] = _add(writer, place, tensor[0], writing)[None]
        else:
            plain[name] = _add(writer, place, tensor, writing)
    for place, each in experts.items():
        stacked = _add(writer, place, torch.stack([tensors[name] for name in each]), writing)
        plain |= {name: part.contiguous() for name, part in zip(each, stacked, strict=True)}
    return plain


def _numbered(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def _order(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> Any:
    """The places of q's and k's rows in transformers' order, in the order of files, which have
    those that rope rotates together side by side."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if heads is None:
        return None
    return np.arange(len(tensor)).reshape(heads, 2, -1).swapaxes(1, 2).flatten()


def _add(writer: Any, name: str, tensor: torch.Tensor, writing: Writing) -> torch.Tensor:
    """Write a tensor in its type; returns its numbers in the file."""
    kind = "F32"
    if tensor.dim() > 1 and not name.endswith("ffn_gate_inp.weight"):
        most, others = MIXES[writing.mix]
        kind = next((each for end, each in others.items() if name.endswith(end)), most)
    if kind in FLOATS:
        kind = type_for(kind, tensor.shape[-1])
        raw = writing.blocks(kind, tensor.float().flatten(0, -2), name)
        numbers = numbers_of_blocks(kind, raw)
        shaped = raw.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, shaped, raw_dtype=gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(numbers.copy()).view(tensor.shape)
    if kind == "BF16":
        rounded = tensor.bfloat16()
        raw_bf16 = rounded.view(torch.uint8).numpy()
        writer.add_tensor(name, raw_bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
        return rounded.float()
    values = tensor.float().contiguous().numpy().astype(np.float16 if kind == "F16" else np.float32)
    writer.add_tensor(name, values)
    return torch.from_numpy(values.astype(np.float32))
