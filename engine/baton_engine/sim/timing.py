"""Timing: how long a simulated step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_engine.interface import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Duration of a step, in milliseconds. A row that computes one token and samples counts as
    decode; the tokens of all other rows count as prefill. A step without rows of a kind has no cost
    for that kind."""

    prefill_base_ms: float = 0.0
    prefill_ms_per_token: float = 0.0
    decode_ms: float = 0.0
    decode_ms_per_seq: float = 0.0

    def step_ms(self, rows: Sequence[Row]) -> float:
        decoding = sum(1 for row in rows if len(row.tokens) == 1 and row.samples)
        tokens = sum(len(row.tokens) for row in rows) - decoding
        total = 0.0
        if tokens:
            total += self.prefill_base_ms + self.prefill_ms_per_token * tokens
        if decoding:
            total += self.decode_ms + self.decode_ms_per_seq * decoding
        return total
