"""A tiny model's folder in two shards, written without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

from baton_text.artifacts import byte_artifacts
from tests.cli.doctor.setups import write_files

HIDDEN, INNER, VOCAB, HEADS = 16, 32, 320, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 256,
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    FIRST: {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    },
    SECOND: {
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    },
}


def safetensors(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """A file of float32 zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def write_model(folder: Path) -> Path:
    files = byte_artifacts(VOCAB)
    named = {tensor: file for file, shapes in SHAPES.items() for tensor in shapes}
    files["config.json"] = json.dumps(CONFIG).encode()
    files[INDEX] = json.dumps({"weight_map": named}).encode()
    write_files(folder, files | {file: safetensors(shapes) for file, shapes in SHAPES.items()})
    return folder
