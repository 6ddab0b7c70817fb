"""A GGUF file with random weights in Qwen3's shape, for llama.cpp.

In: a shape, and the kind of the layers' matrices. Out: a file. The embedding, which is also the
head, has 8 bits: llama.cpp's own tool makes it 6 or 8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from benchmarks.support.engine.cpu_workloads import VOCAB, Shape

Kind = Literal["Q4_0", "Q8_0"]
INPUTS = 32  # of a block
SCALE = 0.01


def write_random_gguf(file: Path, shape: Shape, kind: Kind) -> None:
    config, draw = shape.config(), np.random.default_rng(0)
    writer: Any = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{id}" for id in range(VOCAB)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(0)

    def add(name: str, outputs: int, inputs: int, of: Kind = kind) -> None:
        found = _blocks(draw, outputs, inputs, of)
        writer.add_tensor(name, found, raw_dtype=gguf.GGMLQuantizationType[of])

    def add_norm(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    add("token_embd.weight", VOCAB, shape.hidden, "Q8_0")
    add_norm("output_norm.weight", shape.hidden)
    for layer in range(shape.layers):
        name = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            add_norm(f"{name}.{norm}.weight", shape.hidden)
        for norm in ("attn_q_norm", "attn_k_norm"):
            add_norm(f"{name}.{norm}.weight", shape.head_dim)
        add(f"{name}.attn_q.weight", queries, shape.hidden)
        add(f"{name}.attn_k.weight", keys, shape.hidden)
        add(f"{name}.attn_v.weight", keys, shape.hidden)
        add(f"{name}.attn_output.weight", shape.hidden, queries)
        add(f"{name}.ffn_gate.weight", shape.mlp, shape.hidden)
        add(f"{name}.ffn_up.weight", shape.mlp, shape.hidden)
        add(f"{name}.ffn_down.weight", shape.hidden, shape.mlp)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(
    draw: np.random.Generator, outputs: int, inputs: int, kind: Kind
) -> npt.NDArray[np.uint8]:
    """Rows of blocks: a float16 scale, and the codes of 32 inputs."""
    codes = INPUTS if kind == "Q8_0" else INPUTS // 2
    found = draw.integers(0, 256, (outputs, inputs // INPUTS, 2 + codes), np.uint8)
    scale = np.array([SCALE if kind == "Q4_0" else SCALE / 16], np.float16).view(np.uint8)
    found[..., :2] = scale
    return found.reshape(outputs, -1)
