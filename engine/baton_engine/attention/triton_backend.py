"""TritonAttention: the attention backend for GPUs.

In: the step's rows. Out: a step whose layers store K and V and attend with kernels. The rows'
starts, lengths, block tables and slots are computed on the host once per step and sent to the
device in one copy.

Shapes: T tokens, R rows, M blocks of the longest row, N query heads, K kv heads, H head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.attention.interface import KVSlots
from baton_engine.attention.triton_paged_attention import PagedRows, paged_attention, programs_for
from baton_engine.attention.triton_store_kv import store_kv
from baton_engine.config.model_config import AttentionSpec
from baton_engine.interface import Row
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.staging import stage

# Parts of the staged buffer begin at multiples of this number of int32 (128 bytes): triton compiles
# a kernel again for a pointer that is not a multiple of 16 bytes.
ALIGNMENT = 32

Ints = npt.NDArray[np.int32]


class TritonAttention:
    def __init__(
        self, memory: TorchMemory, specs: Sequence[AttentionSpec], *, exact: bool = False
    ) -> None:
        """`specs` has one entry per layer. With `exact`, the bits of a query's output depend only
        on the query and the keys it sees."""
        self.exact = exact
        self._memory = memory
        self._specs = tuple(specs)
        device = memory.pool.device
        self._processors = 1
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def begin(self, rows: Sequence[Row]) -> TritonStep:
        layout = self._memory.layout
        counts_R = np.asarray([len(row.tokens) for row in rows], np.int32)
        lengths_R = counts_R + np.asarray([row.start for row in rows], np.int32)
        longest = int(lengths_R.max())
        table_RM = _table(rows, -(-lengths_R // layout.block_size))
        starts_R1 = np.concatenate([np.zeros(1, np.int32), counts_R.cumsum(dtype=np.int32)])
        slots_T = _slots(starts_R1, lengths_R, table_RM, layout.block_size)
        staged = _stage_together(
            [starts_R1, lengths_R, table_RM.reshape(-1), slots_T.view(np.int32)],
            self._memory.pool.device,
        )
        one_token = bool((counts_R == 1).all())
        paged = PagedRows(staged[0], staged[1], staged[2].view(table_RM.shape), one_token)
        programs = programs_for(len(rows), layout.num_kv_heads, longest, self._processors)
        slots = KVSlots(self._memory.pool, staged[3].view(torch.int64))
        return TritonStep(slots, paged, self._specs, programs, self.exact)

    def over(
        self, slots_P: torch.Tensor, lengths_P: torch.Tensor, table_PM: torch.Tensor
    ) -> TritonStep:
        """A step of one-token rows over inputs in fixed buffers (see `cuda_graphs`)."""
        layout = self._memory.layout
        rows, width = table_PM.shape
        starts_R1 = torch.arange(rows + 1, dtype=torch.int32, device=table_PM.device)
        longest = width * layout.block_size
        programs = programs_for(rows, layout.num_kv_heads, longest, self._processors)
        paged = PagedRows(starts_R1, lengths_P, table_PM, True)
        return TritonStep(
            KVSlots(self._memory.pool, slots_P), paged, self._specs, programs, self.exact
        )


class TritonStep:
    """StepAttention with kernels. Made by TritonAttention."""

    def __init__(
        self,
        slots: KVSlots,
        rows: PagedRows,
        specs: Sequence[AttentionSpec],
        programs: int,
        exact: bool,
    ) -> None:
        self._slots = slots
        self._rows = rows
        self._specs = specs
        self._programs = programs
        self._exact = exact

    def slots(self) -> KVSlots:
        return self._slots

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        *,
        stored: bool = False,
    ) -> torch.Tensor:
        if not stored:
            store_kv(self._slots, layer, k_TKH, v_TKH)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        spec = self._specs[layer]
        paged_attention(
            *(q_TNH, self._slots.pool[:, layer], self._rows, out_TNH),
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            programs=self._programs,
            exact=self._exact,
        )
        return out_TNH


def _table(rows: Sequence[Row], blocks_R: Ints) -> Ints:
    table_RM = np.zeros((len(rows), int(blocks_R.max())), np.int32)
    counts = blocks_R.tolist()
    used = [row.blocks[:count] for row, count in zip(rows, counts, strict=True)]
    known_RM = np.arange(table_RM.shape[1]) < blocks_R[:, None]
    table_RM[known_RM] = np.fromiter(chain.from_iterable(used), np.int32, sum(counts))
    return table_RM


def _slots(
    starts_R1: Ints, lengths_R: Ints, table_RM: Ints, block_size: int
) -> npt.NDArray[np.int64]:
    """Slot of each token: block * block size + offset in the block."""
    row_T = np.repeat(np.arange(len(lengths_R)), np.diff(starts_R1))
    # A row's new tokens are its last ones, so row r's last token in the step is at position
    # lengths[r] - 1.
    position_T = np.arange(len(row_T)) + (lengths_R - starts_R1[1:])[row_T]
    block_T = table_RM[row_T, position_T // block_size].astype(np.int64)
    slots_T: npt.NDArray[np.int64] = block_T * block_size + position_T % block_size
    return slots_T


def _stage_together(arrays: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, sent in one copy."""
    sizes = [-(-len(array) // ALIGNMENT) * ALIGNMENT for array in arrays]
    buffer = np.zeros(sum(sizes), np.int32)
    begins = np.cumsum([0, *sizes[:-1]]).tolist()
    for begin, array in zip(begins, arrays, strict=True):
        buffer[begin : begin + len(array)] = array
    whole = stage(buffer, device)
    return [whole[at : at + len(array)] for at, array in zip(begins, arrays, strict=True)]
