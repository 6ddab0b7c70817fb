"""Mistral: Llama with a sliding window in every layer. No torch."""

from __future__ import annotations

from baton_engine.config.dense import Dense
from baton_engine.config.families import Family
from baton_engine.config.windows import Windows

FAMILY = Family(
    read=Dense(
        qkv_bias=False, output_bias=False, default_kv_heads=8, windows=Windows("all", 4096)
    ).read,
    model="baton_engine.models.decoder:Decoder",
    examples="Mistral 7B",
    windows="in every layer",
)
