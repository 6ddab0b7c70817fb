"""Qwen3's config.json. No torch."""

from __future__ import annotations

from baton_engine.config.dense import Dense
from baton_engine.config.families import Family
from baton_engine.config.windows import Windows

DENSE = Dense(
    qk_norm=True, default_kv_heads=32, default_head_dim=128, windows=Windows("switched", 4096)
)
FAMILY = Family(
    read=DENSE.read,
    model="baton_engine.models.qwen3.model:Qwen3",
    examples="Qwen3 (dense)",
    windows="by `use_sliding_window`",
)
