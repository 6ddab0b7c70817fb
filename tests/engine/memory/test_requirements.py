"""What an engine needs, by the machine's memory."""

from __future__ import annotations

import pytest

from baton_engine.memory.requirements import batched_tokens

MIB = 1 << 20


@pytest.mark.parametrize(
    ("dtype", "card", "tokens"),
    [
        ("float32", None, 256),
        ("bfloat16", None, 512),
        ("bfloat16", 15_360 * MIB, 2048),  # T4
        ("bfloat16", 24_564 * MIB, 2048),  # RTX 4090
        ("bfloat16", 32_607 * MIB, 2048),  # RTX 5090
        ("bfloat16", 40_960 * MIB, 8192),  # A100, 40 GB
        ("bfloat16", 40_326 * MIB, 8192),  # the same, as CUDA reports it
        ("float32", 81_559 * MIB, 8192),  # H100
    ],
)
def test_large_cards_compute_longer_steps_by_default(
    dtype: str, card: int | None, tokens: int
) -> None:
    assert batched_tokens(dtype, card) == tokens
