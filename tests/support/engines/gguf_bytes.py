"""GGUF files of a few hundred bytes, written number by number, so that each number can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

STRING, ARRAY = 8, 9
F32, Q8_0 = 0, 8
WORDS = ("a", "b", "ab", "c", "<s>", "</s>")
METADATA: Mapping[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": list(WORDS),
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 4,
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


@dataclass(frozen=True)
class TensorBytes:
    """`sizes` has the innermost dimension first. Its bytes are those that the type needs, unless
    `offset` is given."""

    name: str
    sizes: Sequence[int]
    kind: int
    offset: int | None = None


TENSORS = (
    TensorBytes("token_embd.weight", (32, 6), Q8_0),
    *(
        TensorBytes(f"blk.0.{part}.weight", (32, 32), Q8_0)
        for part in (
            *("attn_q", "attn_k", "attn_v", "attn_output"),
            *("ffn_gate", "ffn_up", "ffn_down"),
        )
    ),
    *(
        TensorBytes(name, (32,), F32)
        for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
    ),
)


@dataclass(frozen=True)
class File:
    magic: bytes = b"GGUF"
    version: int = 3
    metadata: Mapping[str, Any] = field(default_factory=lambda: METADATA)
    tensors: Sequence[TensorBytes] = TENSORS
    tensor_count: int | None = None
    entry_count: int | None = None
    # After the last metadata entry.
    more: bytes = b""

    def write(self, place: Path) -> Path:
        place.write_bytes(self.content())
        return place

    def content(self) -> bytes:
        described, end = [], 0
        for tensor in self.tensors:
            at = end if tensor.offset is None else tensor.offset
            described.append(
                text(tensor.name)
                + struct.pack("<I", len(tensor.sizes))
                + struct.pack(f"<{len(tensor.sizes)}Q", *tensor.sizes)
                + struct.pack("<IQ", tensor.kind, at)
            )
            numbers = int(np.prod(tensor.sizes, dtype=object)) if tensor.offset is None else 0
            size = numbers // 32 * 34 if tensor.kind == Q8_0 else 4 * numbers
            end += -(-size // 32) * 32
        entries = len(self.metadata) if self.entry_count is None else self.entry_count
        count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        header = b"".join(
            (
                self.magic + struct.pack("<IQQ", self.version, count, entries),
                *(entry(key, value) for key, value in self.metadata.items()),
                self.more,
                *described,
            )
        )
        return header + bytes(-len(header) % 32 + end)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value: Any) -> bytes:
    return text(key) + typed(value)


def typed(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value  # with its type
    if isinstance(value, list):
        items = [typed(each) for each in value] or [typed("")]
        return (
            struct.pack("<I", ARRAY)
            + items[0][:4]
            + struct.pack("<Q", len(value))
            + b"".join(item[4:] for item in items if value)
        )
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value)
