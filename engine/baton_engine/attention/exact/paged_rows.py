"""One-token rows whose K and V compiled kernels read in the blocks of the pool.

Shapes: R rows, M blocks of a row, N query heads, K kv heads, G = N / K, H head_dim, V numbers of a
head of v, L keys, Q = R N rows of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.attention.exact.paged_products import (
    Arrays,
    Orders,
    PagedMatrices,
)
from baton_engine.attention.exact.pages import PagedKV, Table
from baton_engine.attention.exact.places import places_of
from baton_engine.attention.exact.row_groups import PrefixGroup
from baton_engine.attention.exact.splits import Splits
from baton_engine.attention.interface import TableRow
from baton_engine.config.model_config import AttentionSpec
from baton_engine.cpu_kernels.attention_products import ROWS
from baton_engine.cpu_kernels.attention_task import Part


class PagedRows:
    """Rows whose K and V are read in the blocks of the pool, those that a group shares once. See
    decode_rows()."""

    def __init__(
        self,
        kv: PagedKV,
        orders: Orders,
        rows: Sequence[TableRow],
        places: Sequence[int],
        splits: Splits,
        groups: Sequence[PrefixGroup],
    ) -> None:
        self.places = places_of(places)
        # The scores of a row's shared splits are before column `shared` times the keys of a split,
        # those of its own from there on.
        self.shared = max(group.shared for group in groups)
        self._kv = kv
        starts_R = np.asarray([row.start for row in rows])
        low_R = splits.lowest(starts_R)
        for group in groups:
            low_R[group.members] += group.shared
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
            column=self.shared * splits.keys,
        )
        self._common: PagedMatrices | None = None
        if self.shared:
            self._common = _common_matrices(kv, orders, rows, splits, groups, queries_RN)
        self._scores = (self.shared + count) * splits.keys
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


def _common_matrices(
    kv: PagedKV,
    orders: Orders,
    rows: Sequence[TableRow],
    splits: Splits,
    groups: Sequence[PrefixGroup],
    queries_RN: npt.NDArray[np.int64],
) -> PagedMatrices:
    """The shared splits of each group, with those of the others at the same end: a group with fewer
    of them does not see the first ones. All rows of a group are one matrix per kv head."""
    parts = _head_parts(kv, len(groups))
    width = max(group.shared for group in groups)
    height = max(len(group.members) for group in groups) * kv.num_heads
    height //= kv.num_kv_heads * parts
    table_GM = np.zeros((len(groups), width * splits.blocks), np.int64)
    rows_XM = np.zeros((len(groups) * kv.num_kv_heads * parts, height), np.int64)
    heights, firsts = [], []
    for number, group in enumerate(groups):
        first = rows[group.members[0]].blocks[: group.shared * splits.blocks]
        table_GM[number, table_GM.shape[1] - len(first) :] = first
        queries_XG = queries_RN[group.members].reshape(
            len(group.members), kv.num_kv_heads * parts, -1
        )
        some_XM = queries_XG.transpose(1, 0, 2).reshape(kv.num_kv_heads * parts, -1)
        begin = number * len(some_XM)
        rows_XM[begin : begin + len(some_XM), : some_XM.shape[1]] = some_XM
        heights.append(some_XM.shape[1])
        firsts.append((width - group.shared) * splits.keys)
    seen_G2 = np.stack((firsts, np.full(len(groups), width * splits.keys)), 1)
    return PagedMatrices(
        *_matrices(table_GM, kv.num_kv_heads, parts),
        rows_XM,
        np.repeat(seen_G2, kv.num_kv_heads * parts, 0),
        split=splits.keys,
        orders=orders,
        heights_X=np.repeat(heights, kv.num_kv_heads * parts),
    )


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
