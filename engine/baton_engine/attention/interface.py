"""What a model sees of attention, and what a backend of it has to bring.

In: the step's rows and, per layer, rotated q and k, and v. Out: attention outputs; the new K and V
are written into the pool first, so that a token sees itself through the cache.

Shapes: T tokens of the step, N query heads, K kv heads, H head_dim, B block size, L layers, P
blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton_engine.interface import Row


@dataclass(frozen=True, slots=True)
class KVSlots:
    """Where a step's tokens have their KV: token t at pool[s // B, layer, K or V, :, s % B], with
    s = slots_T[t]; a negative slot has no place, and nothing is stored."""

    pool: torch.Tensor  # [P, L, 2, K, B, H]
    slots_T: torch.Tensor  # int64


class StepAttention(Protocol):
    """Attention of one step, called by each layer in turn."""

    def slots(self) -> KVSlots:
        """For a kernel that stores K and V itself."""
        ...

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        *,
        stored: bool = False,
    ) -> torch.Tensor:
        """Store K and V, unless a kernel has `stored` them already, then attend; [T, N, H]."""
        ...


class AttentionBackend(Protocol):
    def begin(self, rows: Sequence[Row]) -> StepAttention:
        """Prepare a step whose tokens are the rows' tokens one after another. One-token rows that
        stand together are computed together."""
        ...
