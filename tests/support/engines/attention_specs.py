"""Attention specs for tests of attention backends."""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.config.model_config import AttentionSpec
from baton_protocol.layout import KVLayout


def specs_of(
    layout: KVLayout, num_heads: int, windows: Sequence[int | None] = ()
) -> list[AttentionSpec]:
    """One spec per layer; scores are scaled by 1 / sqrt(head_dim)."""
    return [
        AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            scale=layout.head_dim**-0.5,
            window=window,
        )
        for window in windows or [None] * layout.num_layers
    ]
