"""One-token rows whose K and V are copied out of their blocks.

For a CPU whose library adds in an order that the kernels do not have, for block and head sizes that
these do not support, and for a GPU without Triton.

Shapes: R rows, N query heads, K kv heads, G = N / K, H head_dim, V numbers of a head of v, S keys
of a split, C splits, L keys, X = R K matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton_engine.attention.exact.batched_products import BatchedProducts
from baton_engine.attention.exact.pages import PagedKV
from baton_engine.attention.exact.places import places_of
from baton_engine.attention.exact.splits import Hidden, Splits
from baton_engine.attention.interface import TableRow
from baton_engine.config.model_config import AttentionSpec
from baton_engine.cpu_kernels.softmax import SplitFactors
from baton_engine.cpu_kernels.split_sums import sum_splits


class CopiedRows:
    """Rows whose K and V are copied, those that they do not share for some rows at a time. See
    decode_rows()."""

    def __init__(
        self,
        kv: PagedKV,
        products: BatchedProducts,
        rows: Sequence[TableRow],
        places: Sequence[int],
        splits: Splits,
        shared: int,
    ) -> None:
        self.places = places_of(places)
        self.shared = shared
        self._kv = kv
        self._products = products
        self._splits = splits
        starts_R = np.asarray([row.start for row in rows])
        low_R = splits.lowest(starts_R) + shared
        count = int((splits.of(starts_R) - low_R).max()) + 1
        self._common = kv.page_rows(splits.table(rows[:1], [0], shared)) if shared else None
        one_row = kv.num_kv_heads * count * splits.keys * kv.head_dim
        height = max(1, kv.sizes.max_copied // one_row)
        table_RM = splits.table(rows, low_R.tolist(), count)
        parts = [slice(first, first + height) for first in range(0, len(rows), height)]
        self._own = [(part, kv.page_rows(table_RM[part])) for part in parts]
        first_R1 = ((low_R - shared) * splits.keys)[:, None]
        keys_RL = first_R1 + np.arange((shared + count) * splits.keys)
        hidden_RL = splits.hidden(starts_R[:, None], keys_RL)
        hidden_XL = np.repeat(hidden_RL, kv.num_kv_heads, 0)
        self._hidden = Hidden.of(hidden_XL[:, None], kv.device)
        # Keys from here on are those of block 0, which are finite.
        ends_R = (starts_R // kv.block_size + 1) * kv.block_size
        self._written = int((ends_R - (low_R - shared) * splits.keys).max())

    def attend(
        self,
        layer: int,
        q_RNH: torch.Tensor,
        spec: AttentionSpec,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv, (rows, heads, dim) = self._kv, q_RNH.shape
        q_RKGH = q_RNH.reshape(rows, kv.num_kv_heads, heads // kv.num_kv_heads, dim)
        scores_XGL = self._scores(layer, q_RKGH, spec)
        if self._hidden is not None:
            self._hidden.hide(scores_XGL)
        sinks_XG = None
        if sinks_N is not None:
            sinks_XG = sinks_N.repeat(rows).view(scores_XGL.shape[:2])
        factors = None
        if kv.by_split:
            matrices, group, keys = scores_XGL.shape
            factors = SplitFactors.empty(matrices, group, keys // self._splits.keys)
        weights_XGCS = self._splits.weights(scores_XGL, sinks_XG, factors)
        out_XGV = sum_splits(self._sums(layer, weights_XGCS), factors)
        return out_XGV.to(q_RNH.dtype).view(rows, heads, kv.value_dim)

    def _scores(self, layer: int, q_RKGH: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Scores [X, G, L] of the shared keys and of each row's own."""
        parts = []
        for part, pages in self._own:
            q_XGH = q_RKGH[part].flatten(0, 1)
            k_XLH = self._kv.gather_k(layer, pages).view(len(q_XGH), -1, q_XGH.shape[-1])
            parts.append(self._products.scores(q_XGH, k_XLH, spec))
        own_XGL = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._common is None:
            return own_XGL
        rows, kv_heads, group, dim = q_RKGH.shape
        q_KMH = q_RKGH.transpose(0, 1).flatten(1, 2)
        k_KLH = self._kv.gather_k(layer, self._common).view(kv_heads, -1, dim)
        scores_KML = self._products.scores(q_KMH, k_KLH, spec)
        scores_RKGL = scores_KML.view(kv_heads, rows, group, -1).transpose(0, 1)
        return torch.cat((scores_RKGL.flatten(0, 1), own_XGL), -1)

    def _sums(self, layer: int, weights_XGCS: torch.Tensor) -> torch.Tensor:
        """Sums of V times weight [X, G, C, V], of the shared splits and of each row's own."""
        if self._common is None:
            return self._own_sums(layer, weights_XGCS, 0)
        kv_heads, dim = self._kv.num_kv_heads, self._kv.value_dim
        v_KLV = self._kv.gather_v(layer, self._common).view(kv_heads, -1, dim)
        rows, (group, splits, keys) = len(weights_XGCS) // kv_heads, weights_XGCS.shape[1:]
        weights_RKGCS = weights_XGCS.view(rows, kv_heads, group, splits, keys)
        weights_RKGCS = weights_RKGCS[..., : self.shared, :]
        weights_KMCS = weights_RKGCS.transpose(0, 1).flatten(1, 2)
        sums_KMCV = self._products.sums(weights_KMCS, v_KLV)
        sums_RKGCV = sums_KMCV.reshape(kv_heads, rows, group, -1, dim).transpose(0, 1)
        own_XGCV = self._own_sums(layer, weights_XGCS[:, :, self.shared :], self.shared)
        return torch.cat((sums_RKGCV.flatten(0, 1), own_XGCV), 2)

    def _own_sums(self, layer: int, weights_XGCS: torch.Tensor, first: int) -> torch.Tensor:
        """Sums over the rows' own splits, from split `first` on."""
        kv_heads, dim = self._kv.num_kv_heads, self._kv.value_dim
        parts = []
        for part, pages in self._own:
            matrices = slice(part.start * kv_heads, part.stop * kv_heads)
            weights = weights_XGCS[matrices]
            v_XLV = self._kv.gather_v(layer, pages).view(len(weights), -1, dim)
            if self._hidden is not None:
                keys = slice(first * self._splits.keys, self._written)
                self._hidden.clear(v_XLV, matrices, keys)
            parts.append(self._products.sums(weights, v_XLV))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
