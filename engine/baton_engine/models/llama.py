"""Llama: the family without additions. No torch."""

from __future__ import annotations

from baton_engine.config.dense import Dense
from baton_engine.config.families import Family

FAMILY = Family(
    read=Dense(whole_heads=True).read,
    model="baton_engine.models.decoder:Decoder",
    examples="Llama 2 and 3, SmolLM2",
    windows="refused",
)
