"""TritonAttention: the attention backend for GPUs.

In: the step's batch. Out: a step whose layers store K and V and attend with kernels, which read the
batch's arrays on the device.

Shapes: T tokens, R rows, M blocks of the longest row, N query heads, K kv heads, H head_dim, V
numbers of a head of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_engine.attention.interface import KVSlots, StepBatch
from baton_engine.attention.layer_kv import LayerKV, layers_kv
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
        self._layers = layers_kv(memory, specs)
        self._places = memory.layout.layer_places
        self._rounds = memory.layout.codec != "none"
        self._specs = tuple(specs)
        self._heads = {spec.num_kv_heads for spec in specs}
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
        # Only keys of one-token rows are divided.
        programs = dict.fromkeys(self._heads, 1)
        if batch.one_token_rows:
            programs = {
                heads: programs_for(batch.rows, heads, batch.max_seq_len, self._processors)
                for heads in self._heads
            }
        layers = [
            StepLayer(
                *(groups[group], kv, arrays.groups[group].slots_T, self._rounds, spec),
                Launch(programs[spec.num_kv_heads], exact=self.exact, tile=self._tile),
            )
            for (group, _), kv, spec in zip(self._places, self._layers, self._specs, strict=True)
        ]
        return TritonStep(layers)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernels of a step are launched for layers; see paged_attention()."""

    programs: int
    exact: bool
    tile: OneTokenTile


@dataclass(frozen=True, slots=True)
class StepLayer:
    """A layer's rows, K and V, slots of the new tokens, whether these are rounded, attention, and
    launch."""

    rows: StepRows
    kv: LayerKV
    slots_T: torch.Tensor
    rounds: bool
    spec: AttentionSpec
    launch: Launch

    @property
    def slots(self) -> KVSlots:
        kv = self.kv
        return KVSlots(kv.k_PKBH, kv.v_PKBV, self.slots_T, kv.exponents, self.rounds)


class TritonStep:
    """StepAttention with kernels."""

    def __init__(self, layers: Sequence[StepLayer]) -> None:
        self._layers = layers

    def slots(self, layer: int) -> KVSlots:
        return self._layers[layer].slots

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKV: torch.Tensor | None,
        *,
        stored: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        each = self._layers[layer]
        if not stored:
            store_kv(each.slots, k_TKH, v_TKV)
        spec = each.spec
        assert spec.sinks == (sinks_N is not None)
        shape = (*q_TNH.shape[:2], spec.value_dim)
        out_TNV = torch.empty(shape, dtype=q_TNH.dtype, device=q_TNH.device)
        paged_attention(
            *(q_TNH, each.kv, each.rows, out_TNV),
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks_N=sinks_N,
            programs=each.launch.programs,
            exact=each.launch.exact,
            tile=each.launch.tile,
        )
        return out_TNV
