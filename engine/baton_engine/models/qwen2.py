"""Qwen2: Llama with biases on q, k and v, and optional sliding windows. No torch."""

from __future__ import annotations

from baton_engine.config.dense import Dense
from baton_engine.config.families import Family
from baton_engine.config.windows import Windows

FAMILY = Family(
    read=Dense(
        qkv_bias=True,
        output_bias=False,
        default_kv_heads=32,
        windows=Windows("switched", 4096),
    ).read,
    model="baton_engine.models.decoder:Decoder",
    examples="Qwen2, Qwen2.5",
    windows="by `use_sliding_window`",
)
