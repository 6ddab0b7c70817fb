"""TritonAttention: the attention backend for GPUs.

In: the step's batch. Out: a step whose layers store K and V and attend with kernels, which read the
batch's arrays on the device.

Shapes: T tokens, R rows, M blocks of the longest row, N query heads, K kv heads, H head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_engine.attention.interface import KVSlots, StepBatch
from baton_engine.attention.triton_paged_attention import (
    ONE_TOKEN_TILE,
    OneTokenTile,
    StepRows,
    paged_attention,
    programs_for,
)
from baton_engine.attention.triton_store_kv import store_kv
from baton_engine.config.model_config import AttentionSpec
from baton_engine.kv.kv_pool import TorchMemory


class TritonAttention:
    def __init__(
        self,
        memory: TorchMemory,
        specs: Sequence[AttentionSpec],
        *,
        exact: bool = False,
        tile: OneTokenTile = ONE_TOKEN_TILE,
    ) -> None:
        """`specs` has one entry per layer. With `exact`, the bits of a query's output depend only
        on the query and the keys it sees. `tile` is that of steps of one-token rows."""
        self.exact = exact
        self._tile = tile
        self._memory = memory
        self._specs = tuple(specs)
        device = memory.pool.device
        self._processors = 1
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    @property
    def recordable(self) -> bool:
        return True

    def begin(self, batch: StepBatch) -> TritonStep:
        arrays, one_token = batch.device, batch.max_query_len == 1
        groups = [
            StepRows(arrays.query_starts_R1, arrays.seq_lens_R, group.table_RM, one_token)
            for group in arrays.groups
        ]
        heads, programs = self._memory.layout.num_kv_heads, 1
        # Only keys of one-token rows are divided.
        if batch.one_token_rows:
            programs = programs_for(batch.rows, heads, batch.max_seq_len, self._processors)
        slots = [group.slots_T for group in arrays.groups]
        launch = Launch(programs, exact=self.exact, tile=self._tile)
        return TritonStep(self._memory, groups, slots, self._specs, launch)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernels of a step are launched; see paged_attention()."""

    programs: int
    exact: bool
    tile: OneTokenTile


class TritonStep:
    """StepAttention with kernels. `groups` and `slots` have the rows and the tokens' slots of each
    KV group."""

    def __init__(
        self,
        memory: TorchMemory,
        groups: Sequence[StepRows],
        slots: Sequence[torch.Tensor],
        specs: Sequence[AttentionSpec],
        launch: Launch,
    ) -> None:
        self._specs = specs
        self._launch = launch
        places = memory.layout.layer_places
        self._rows = [groups[group] for group, _ in places]
        self._slots = [KVSlots(memory.pool, index, slots[group]) for group, index in places]

    def slots(self, layer: int) -> KVSlots:
        return self._slots[layer]

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        *,
        stored: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slots = self._slots[layer]
        if not stored:
            store_kv(slots, k_TKH, v_TKH)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        spec = self._specs[layer]
        assert spec.sinks == (sinks_N is not None)
        paged_attention(
            *(q_TNH, slots.pool[:, slots.layer], self._rows[layer], out_TNH),
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks_N=sinks_N,
            programs=self._launch.programs,
            exact=self._launch.exact,
            tile=self._launch.tile,
        )
        return out_TNH
