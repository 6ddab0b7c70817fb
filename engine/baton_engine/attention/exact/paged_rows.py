"""One-token rows whose K and V compiled kernels read in the blocks of the pool.

Shapes: R rows, M blocks of a row, N query heads, K kv heads, G = N / K, H head_dim, V numbers of a
head of v, L keys, Q = R N rows of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton_engine.attention.exact.paged_products import (
    Arrays,
    Orders,
    PagedMatrices,
)
from baton_engine.attention.exact.pages import PagedKV, Table
from baton_engine.attention.exact.places import places_of
from baton_engine.attention.exact.splits import Splits
from baton_engine.attention.interface import TableRow
from baton_engine.config.model_config import AttentionSpec
from baton_engine.cpu_kernels.attention_task import Part
from baton_engine.cpu_kernels.paged_attention import ROWS


class PagedRows:
    """Rows whose K and V are read in the blocks of the pool. See decode_rows()."""

    def __init__(
        self,
        kv: PagedKV,
        orders: Orders,
        rows: Sequence[TableRow],
        places: Sequence[int],
        splits: Splits,
        shared: int,
    ) -> None:
        self.places = places_of(places)
        self.shared = shared
        self._kv = kv
        starts_R = np.asarray([row.start for row in rows])
        low_R = splits.lowest(starts_R) + shared
        count = int((splits.of(starts_R) - low_R).max()) + 1
        # Query head n of row r is row r N + n of all arrays.
        queries_RN = np.arange(len(rows) * kv.num_heads).reshape(len(rows), -1)
        parts = _head_parts(kv, len(rows))
        seen_R2 = splits.seen(starts_R, 0) - (low_R * splits.keys)[:, None]
        self._own = PagedMatrices(
            *_matrices(splits.table(rows, low_R.tolist(), count), kv.num_kv_heads, parts),
            queries_RN.reshape(len(rows) * kv.num_kv_heads * parts, -1),
            np.repeat(seen_R2.clip(min=0), kv.num_kv_heads * parts, 0),
            split=splits.keys,
            orders=orders,
            column=shared * splits.keys,
        )
        self._common: PagedMatrices | None = None
        if shared:
            parts = _head_parts(kv, 1)
            queries_RXG = queries_RN.reshape(len(rows), kv.num_kv_heads * parts, -1)
            self._common = PagedMatrices(
                *_matrices(splits.table(rows[:1], [0], shared), kv.num_kv_heads, parts),
                queries_RXG.transpose(1, 0, 2).reshape(kv.num_kv_heads * parts, -1),
                np.tile((0, shared * splits.keys), (kv.num_kv_heads * parts, 1)),
                split=splits.keys,
                orders=orders,
            )
        self._scores = (shared + count) * splits.keys
        self._split = splits.keys

    def attend(
        self,
        layer: int,
        q_RNH: torch.Tensor,
        spec: AttentionSpec,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv, own, common = self._kv, self._own, self._common
        if kv.by_split:
            return self._attend_by_split(layer, q_RNH, spec)
        q_QH = q_RNH.reshape(-1, q_RNH.shape[-1])
        out_RNV = q_RNH.new_empty(*q_RNH.shape[:2], kv.value_dim)
        # Made for each layer, because a step may have many groups.
        scores_QL = torch.empty(len(q_QH), self._scores)
        sums_QV = torch.empty(len(q_QH), kv.value_dim)
        sinks_Q = None if sinks_N is None else sinks_N.repeat(len(q_RNH))
        arrays = Arrays(kv.layers[layer], q_QH, scores_QL, sums_QV, out_RNV, sinks_Q)
        if common is None and spec.soft_cap is None:
            own.compute(Part.ALL, arrays, spec.scale)
            return out_RNV
        weights = Part.SOFTMAX | Part.NO_SUMS
        if common is not None:
            common.compute(Part.SCORES, arrays, spec.scale)
        if spec.soft_cap is None:
            own.compute(Part.SCORES | weights, arrays, spec.scale)
        else:
            own.compute(Part.SCORES, arrays, spec.scale)
            cap = spec.soft_cap
            hidden_QL = scores_QL == -torch.inf
            scores_QL.div_(cap).tanh_().mul_(cap).masked_fill_(hidden_QL, -torch.inf)
            own.compute(weights, arrays, spec.scale)
        if common is not None:  # its splits come first
            common.compute(Part.SUMS, arrays, spec.scale)
        own.compute(Part.SUMS | Part.OUTPUT, arrays, spec.scale)
        return out_RNV

    def _attend_by_split(
        self, layer: int, q_RNH: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """The same with weights by split, in which K and V of a split are read together."""
        kv, own, common = self._kv, self._own, self._common
        assert spec.soft_cap is None, "weights by split with a soft cap"
        q_QH = q_RNH.reshape(-1, q_RNH.shape[-1])
        out_RNV = q_RNH.new_empty(*q_RNH.shape[:2], kv.value_dim)
        scores_QS, sums_QV = (
            torch.empty(len(q_QH), self._split),
            torch.empty(len(q_QH), kv.value_dim),
        )
        states_Q4 = torch.empty(len(q_QH), 4)
        arrays = Arrays(kv.layers[layer], q_QH, scores_QS, sums_QV, out_RNV, states_Q4=states_Q4)
        first = Part.NO_SUMS | Part.SPLITS
        if common is not None:  # its splits come first
            common.compute(first, arrays, spec.scale)
            first = Part.SPLITS
        own.compute(first | Part.OUTPUT, arrays, spec.scale)
        return out_RNV


def _head_parts(kv: PagedKV, rows: int) -> int:
    """How many matrices the query heads of a kv head are. They are divided if there are fewer rows
    of latents, whose heads share one kv head, than threads. These read the rows side by side."""
    if not kv.by_split:
        return 1
    threads, most = torch.get_num_threads(), kv.num_heads // ROWS
    fitting = [parts for parts in range(1, most + 1) if kv.num_heads % parts == 0]
    return next((parts for parts in fitting if rows * parts >= threads), max(fitting, default=1))


def _matrices(table_RM: Table, kv_heads: int, parts: int) -> tuple[Table, Table]:
    """The blocks and the kv head of each matrix: `parts` matrices per row and kv head."""
    heads = np.tile(np.arange(kv_heads).repeat(parts), len(table_RM))
    return np.repeat(table_RM, kv_heads * parts, 0), heads
