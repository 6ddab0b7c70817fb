"""Attention of queries whose K and V stay in the blocks of the pool.

In: per step the pages of each matrix, per layer queries. Out: the bits that `batched_products`
gives for copies of the pages, if `Orders` are those of the library's products. A page is one block
of one kv head.

Shapes: X matrices, M rows of a matrix, P pages of a matrix, B block size, H head_dim, V numbers of
a head of v, S keys of a split, L scores of a row, Q all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.attention.cpu_bf16 import multiplies_bf16
from baton_engine.attention.layer_kv import LayerKV
from baton_engine.cpu_kernels.attention_task import AttentionTask, Order, Part
from baton_engine.cpu_kernels.openmp import NONE_TAKEN, run_kernel
from baton_engine.cpu_kernels.paged_attention import (
    TILE,
    UNIT,
    bf16_attention,
    bf16_attention_by_split,
    bf16_attention_of_codes,
    bf16_attention_of_codes_by_split,
    fp32_attention,
    fp32_attention_by_split,
    fp32_attention_of_codes,
    fp32_attention_of_codes_by_split,
)

Indexes = npt.NDArray[np.integer]
# By whether the pool has codes, weights are by split, and products in bfloat16.
_KERNELS = {
    (False, False, False): fp32_attention,
    (False, False, True): bf16_attention,
    (False, True, False): fp32_attention_by_split,
    (False, True, True): bf16_attention_by_split,
    (True, False, False): fp32_attention_of_codes,
    (True, False, True): bf16_attention_of_codes,
    (True, True, False): fp32_attention_of_codes_by_split,
    (True, True, True): bf16_attention_of_codes_by_split,
}


def can_compute(dtype: torch.dtype, head_dim: int, value_dim: int, block_size: int) -> bool:
    """Whether the kernels support this dtype and these shapes."""
    numbers = dtype in (torch.float32, torch.bfloat16)
    return numbers and head_dim % TILE == 0 and value_dim % TILE == 0 and block_size % UNIT == 0


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of additions of both products. A score is the sum of those of `block` numbers of q
    and k each, 0: of all."""

    scores: Order = Order.IN_TURN
    sums: Order = Order.IN_TURN
    block: int = 0


@dataclass(frozen=True, slots=True)
class Arrays:
    """What one layer's attention reads and writes: K and V; queries and outputs in their dtype,
    contiguous; scores, which become weights, and sums; the sink of each row, if there are any. The
    output has any shape of Q V numbers."""

    kv: LayerKV
    queries_QH: torch.Tensor
    scores_QL: torch.Tensor  # float32
    sums_QV: torch.Tensor  # float32
    output_QV: torch.Tensor
    sinks_Q: torch.Tensor | None = None  # float32
    states_Q4: torch.Tensor | None = None  # float32, of layers with weights by split


class PagedMatrices:
    """Rows to multiply with the same pages, for all layers of a step.

    Matrix x has the rows `rows_XM` of queries, scores and outputs, of which it has the first
    `heights_X` if they differ, and the blocks `blocks_XP` of kv
    head `heads_X`, of which its rows see keys [begin, end) = `seen_X2`. Its first key has its
    scores in column `column`. Splits of `split` keys begin at the first key. All layers have the
    same shapes and strides.
    """

    def __init__(
        self,
        blocks_XP: Indexes,
        heads_X: Indexes,
        rows_XM: Indexes,
        seen_X2: Indexes,
        *,
        split: int,
        orders: Orders,
        column: int = 0,
        heights_X: Indexes | None = None,
    ) -> None:
        self._task = AttentionTask()
        # Kept, because the task has their addresses.
        if heights_X is None:
            heights_X = np.full(*rows_XM.shape)
        arrays = {"blocks": blocks_XP, "heads": heads_X, "rows": rows_XM, "seen": seen_X2}
        arrays["heights"] = heights_X
        self._arrays = {
            name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()
        }
        self._set(**{name: array.ctypes.data for name, array in self._arrays.items()})
        self._set(matrices=len(rows_XM), height=rows_XM.shape[1], width=blocks_XP.shape[1])
        self._set(column=column, split=split)
        self._set(scores_order=orders.scores, sums_order=orders.sums, scores_block=orders.block)
        self._shaped = False

    def compute(self, parts: Part, arrays: Arrays, scale: float) -> None:
        """Compute some parts of the attention of these rows."""
        keys, values, exponents = arrays.kv.k_PKBH, arrays.kv.v_PKBV, arrays.kv.exponents
        bf16 = arrays.queries_QH.dtype == torch.bfloat16
        if not self._shaped:
            self._set_shapes(arrays.kv, rounded=bf16 and multiplies_bf16())
        self._set(
            next=NONE_TAKEN,
            parts=parts,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            queries=arrays.queries_QH.data_ptr(),
            scores=arrays.scores_QL.data_ptr(),
            row_scores=arrays.scores_QL.shape[1],
            sinks=0 if arrays.sinks_Q is None else arrays.sinks_Q.data_ptr(),
            sums=arrays.sums_QV.data_ptr(),
            output=arrays.output_QV.data_ptr(),
            states=0 if arrays.states_Q4 is None else arrays.states_Q4.data_ptr(),
            scale=scale,
        )
        if exponents is not None:
            places = exponents.k_PKB1.data_ptr(), exponents.v_PKB1.data_ptr()
            self._set(key_exponents=places[0], value_exponents=places[1])
        by_split = Part.SPLITS in parts
        assert not by_split or arrays.states_Q4 is not None, "weights by split without states"
        kernel = _KERNELS[exponents is not None, by_split, bf16]
        run_kernel(kernel, self._task, self._task.matrices)

    def _set_shapes(self, kv: LayerKV, *, rounded: bool) -> None:
        self._shaped = True
        keys, values = kv.k_PKBH, kv.v_PKBV
        _, _, block, dim = keys.shape
        self._set(block=block, dim=dim, value_dim=values.shape[3], rounded=rounded)
        if not self._task.scores_block:
            self._set(scores_block=dim)
        for name, pages in (("key", keys), ("value", values)):
            steps = [step * pages.element_size() for step in pages.stride()]
            names = (f"{name}_{unit}_bytes" for unit in ("block", "head", "slot"))
            self._set(**dict(zip(names, steps, strict=False)))
        if kv.exponents is not None:
            block_bytes, head_bytes, slot_bytes, _ = kv.exponents.k_PKB1.stride()
            assert kv.exponents.v_PKB1.stride() == kv.exponents.k_PKB1.stride()
            assert slot_bytes == 1, "exponents are apart"
            self._set(exponent_block_bytes=block_bytes, exponent_head_bytes=head_bytes)
            self._set(fp8=keys.dtype == torch.float8_e4m3fn)

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self._task, name, value)
