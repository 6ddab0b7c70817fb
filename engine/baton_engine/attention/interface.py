"""The Protocols between a model and an attention backend.

In: the step's rows and, per layer, rotated q and k, and v. Out: attention outputs. The new K and V
are written to the pool first, because a token attends to itself through the cache.

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
    s = slots_T[t]. The KV of a token with a negative slot is not stored."""

    pool: torch.Tensor  # [P, L, 2, K, B, H]
    slots_T: torch.Tensor  # int64


class StepAttention(Protocol):
    """Attention of one step, called by each layer in turn."""

    def slots(self) -> KVSlots:
        """The slots of the step's tokens, for kernels that store K and V themselves."""
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
        """Store K and V, unless a kernel already has (`stored`), and return the attention outputs
        [T, N, H]."""
        ...


class AttentionBackend(Protocol):
    @property
    def exact(self) -> bool:
        """Whether the bits of a query's output depend only on the query and the keys it sees."""
        ...

    def begin(self, rows: Sequence[Row]) -> StepAttention:
        """Prepare a step whose tokens are the rows' tokens, concatenated. Backends may compute
        neighbouring one-token rows together."""
        ...
