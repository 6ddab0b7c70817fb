"""Qwen3: Llama with normalised heads of q and k, and optional sliding windows. No torch."""

from __future__ import annotations

from baton_engine.config.dense import Dense
from baton_engine.config.families import Family
from baton_engine.config.windows import Windows

FAMILY = Family(
    read=Dense(
        qk_norm=True, default_kv_heads=32, default_head_dim=128, windows=Windows("switched", 4096)
    ).read,
    model="baton_engine.models.decoder:Decoder",
    examples="Qwen3 (dense)",
    windows="by `use_sliding_window`",
)
