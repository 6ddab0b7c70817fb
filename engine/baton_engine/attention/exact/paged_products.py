"""Scores, and weighted sums of V, of queries whose K and V stay in the blocks of the pool.

In: per step the pages of each matrix, per layer queries or weights. Out: the bits that
`batched_products` gives for copies of the pages, if `Orders` are those of the library's products.

Shapes: X matrices, M rows of a matrix, P pages of a matrix, B block size, H head_dim, S keys of a
split, L scores of a row, Q all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.attention.cpu_bf16 import multiplies_bf16
from baton_engine.attention.exact.openmp import NONE_TAKEN, call_on_threads
from baton_engine.attention.exact.paged_kernels import (
    TASK,
    TILE,
    UNIT,
    Order,
    bf16_scores,
    bf16_sums,
    fp32_scores,
    fp32_sums,
    kernel,
)

Indexes = npt.NDArray[np.integer]


def can_compute(dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Whether the kernels support this dtype and these shapes."""
    return (
        dtype in (torch.float32, torch.bfloat16) and head_dim % TILE == 0 and block_size % UNIT == 0
    )


def wide_queries(q: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries as PagedMatrices.scores() needs them: float32 and contiguous."""
    return q.float().contiguous() if _rounds_scores(q.dtype) else q.float() * scale


def _rounds_scores(dtype: torch.dtype) -> bool:
    """Whether cpu_bf16.wide_scores() rounds products to bfloat16."""
    return dtype == torch.bfloat16 and multiplies_bf16()


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of additions of both products."""

    scores: Order = Order.IN_TURN
    sums: Order = Order.IN_TURN


class PagedMatrices:
    """Rows to multiply with the same pages, for all layers of a step.

    Matrix x has the rows `rows_XM` of queries, scores and outputs, and the pages `pages_XP`, of
    which its rows see keys [begin, end) = `seen_X2`. Its first key has its scores in column
    `column`. Splits of `split` keys begin at the first key.
    """

    def __init__(
        self,
        pages_XP: Indexes,
        rows_XM: Indexes,
        seen_X2: Indexes,
        *,
        split: int,
        orders: Orders,
        column: int = 0,
    ) -> None:
        self._orders = orders
        self._task = np.zeros(1, TASK)
        self._fields = self._task[0]
        # Kept, because the task has their addresses.
        arrays = {"pages": pages_XP, "rows": rows_XM, "seen": seen_X2}
        self._arrays = {
            name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()
        }
        self._set(**{name: array.ctypes.data for name, array in self._arrays.items()})
        self._set(matrices=len(rows_XM), height=rows_XM.shape[1], width=pages_XP.shape[1])
        self._set(column=column, split=split)

    def scores(
        self, k_pages: torch.Tensor, q_QH: torch.Tensor, scale: float, scores_QL: torch.Tensor
    ) -> None:
        """Write the scores of these rows; -inf for keys that a row does not see. `q_QH` comes from
        wide_queries(). `k_pages` has a page in each row, [B * H]."""
        bf16 = k_pages.dtype == torch.bfloat16
        self._set(
            queries=q_QH.data_ptr(),
            scale=scale,
            rounded=_rounds_scores(k_pages.dtype),
            order=self._orders.scores,
        )
        self._run(bf16_scores if bf16 else fp32_scores, k_pages, scores_QL, q_QH.shape[1])

    def add_sums(
        self, v_pages: torch.Tensor, weights_QL: torch.Tensor, out_QH: torch.Tensor
    ) -> None:
        """Add the sums of V times weight to `out_QH`, float32, one split after the other."""
        bf16 = v_pages.dtype == torch.bfloat16
        self._set(out=out_QH.data_ptr(), order=self._orders.sums)
        self._run(bf16_sums if bf16 else fp32_sums, v_pages, weights_QL, out_QH.shape[1])

    def _run(
        self,
        function: Callable[[Any], None],
        pages: torch.Tensor,
        scores_QL: torch.Tensor,
        dim: int,
    ) -> None:
        self._set(
            next=NONE_TAKEN,
            pool=pages.data_ptr(),
            page_bytes=pages.stride(0) * pages.element_size(),
            block=pages.shape[1] // dim,
            dim=dim,
            scores=scores_QL.data_ptr(),
            row_scores=scores_QL.shape[1],
        )
        call_on_threads(kernel(function), self._task.ctypes.data)

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            self._fields[name] = value
