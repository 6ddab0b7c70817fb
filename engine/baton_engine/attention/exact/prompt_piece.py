"""Attention of consecutive tokens of one row, some tokens and kv heads at a time.

K and V are copied from the blocks into one matrix before they are multiplied.

Shapes: T tokens of the piece, N query heads, K kv heads, G = N / K, H head_dim, V numbers of a head
of v, S keys of a split, C splits, L = C S keys, M rows of a product (tokens times G), X matrices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton_engine.attention.exact.batched_products import BatchedProducts
from baton_engine.attention.exact.pages import PagedKV
from baton_engine.attention.exact.places import Places
from baton_engine.attention.exact.splits import Hidden, Splits
from baton_engine.attention.interface import TableRow
from baton_engine.config.model_config import AttentionSpec
from baton_engine.cpu_kernels.softmax import SplitFactors
from baton_engine.cpu_kernels.split_sums import add_splits, can_add_splits, sum_splits

# Tokens of a prompt that are computed at a time. More would compute more scores of keys that a
# token does not see, and fewer would take more calls.
PIECE_TOKENS = 64
_Part = tuple[slice, int, Hidden | None, npt.NDArray[np.int32]]


class PromptPiece:
    """Consecutive tokens of one row. Computes as many tokens and kv heads at a time as `max_scores`
    allows, and at least one."""

    def __init__(
        self, kv: PagedKV, products: BatchedProducts, row: TableRow, begin: int, splits: Splits
    ) -> None:
        self.places: Places = slice(begin, begin + row.count)
        self._kv = kv
        self._products = products
        self._splits = splits
        self._queries_T = np.arange(row.start, row.start + row.count)
        self._low = splits.lowest(row.start)
        count = splits.of(int(self._queries_T[-1])) + 1 - self._low
        self._keys = count * splits.keys
        # The keys that any query sees, counted from the first that is read.
        first = 0 if splits.window is None else max(0, row.start + 1 - splits.window)
        begins = self._low * splits.keys
        self._seen = slice(first - begins, int(self._queries_T[-1]) + 1 - begins)
        self._pages = kv.page_rows(splits.table([row], [self._low], count))
        self._parts: list[_Part] | None = None

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        spec: AttentionSpec,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv, (tokens, heads, dim) = self._kv, q_TNH.shape
        by_head = (tokens, kv.num_kv_heads, heads // kv.num_kv_heads, dim)
        k_KLH = kv.gather_k(layer, self._pages).view(kv.num_kv_heads, -1, dim)
        v_KLV = kv.gather_v(layer, self._pages).view(kv.num_kv_heads, -1, kv.value_dim)
        # A weight of 0 does not remove NaN, and memory that no query sees may hold it.
        v_KLV[:, : self._seen.start] = 0.0
        v_KLV[:, self._seen.stop :] = 0.0
        shape = (tokens, heads, kv.value_dim)
        out_TNV = torch.empty(shape, dtype=q_TNH.dtype, device=q_TNH.device)
        add_in_place = can_add_splits(out_TNV)
        out_KTGV = out_TNV.view(*by_head[:3], kv.value_dim).transpose(0, 1)
        q_KTGH = q_TNH.reshape(by_head).transpose(0, 1)
        sinks_KG = None if sinks_N is None else sinks_N.view(kv.num_kv_heads, -1)
        each_token = by_head[2] * self._keys
        height = min(
            tokens,
            PIECE_TOKENS,
            max(1, kv.sizes.max_scores // each_token),
            max(1, self._products.most_rows // by_head[2]),
        )
        width = max(1, kv.sizes.max_scores // (height * each_token))
        for part, seen, hidden, seen_R2 in self._parts_of(height, by_head[2]):
            for head in range(0, kv.num_kv_heads, width):
                some = slice(head, head + width)
                q_XTGH = q_KTGH[some, part]
                q_XMH = q_XTGH.flatten(1, 2)
                rows = q_XMH.shape[1]
                sinks_XR = None
                if sinks_KG is not None:
                    sinks_XR = sinks_KG[some].repeat(1, rows // by_head[2])
                # Padding here is cheaper than in each product.
                q_XMH = F.pad(q_XMH, (0, 0, 0, self._products.rows(rows) - rows))
                k_XLH, v_XLV = k_KLH[some, :seen], v_KLV[some, :seen]
                if q_TNH.device.type == "cpu":
                    factors = None
                    if kv.by_split:
                        splits = seen // self._splits.keys
                        factors = SplitFactors.empty(len(q_XMH), rows, splits)
                    weights_XCMS = self._products.weights(
                        q_XMH, k_XLH, spec, seen_R2, self._splits.keys, sinks_XR, factors
                    )
                    sums_XMCV = self._products.multiplied(weights_XCMS, v_XLV)
                    if add_in_place:
                        sums_XCMV = sums_XMCV.transpose(1, 2)
                        add_splits(sums_XCMV, out_TNV[part], by_head[2], head, factors)
                        continue
                    out_XMV = sum_splits(sums_XMCV[:, :rows], factors)
                else:
                    scores_XML = self._products.scores(q_XMH, k_XLH, spec)
                    if hidden is not None:
                        hidden.hide(scores_XML[:, :rows])
                    if sinks_XR is not None:
                        sinks_XR = F.pad(sinks_XR, (0, scores_XML.shape[1] - rows))
                    weights_XMCS = self._splits.weights(scores_XML, sinks_XR)
                    out_XMV = sum_splits(self._products.sums(weights_XMCS, v_XLV))
                out_KTGV[some, part] = out_XMV[:, :rows].view(*q_XTGH.shape[:3], -1)
        return out_TNV

    def _parts_of(self, height: int, group: int) -> list[_Part]:
        """`height` tokens at a time: the tokens, the number of keys up to the last that they see,
        those that some do not see, and what each row of a product sees. Made by the first layer."""
        if self._parts is None:
            self._parts = []
            for first in range(0, len(self._queries_T), height):
                part_T = self._queries_T[first : first + height]
                seen = (self._splits.of(int(part_T[-1])) + 1 - self._low) * self._splits.keys
                # The G query heads of a token are neighbouring rows of a product.
                hidden = None
                if self._kv.device.type != "cpu":  # whose kernels need no mask
                    keys_L = self._low * self._splits.keys + np.arange(seen)
                    hidden_TL = self._splits.hidden(part_T[:, None], keys_L)
                    hidden = Hidden.of(np.repeat(hidden_TL, group, 0)[None], self._kv.device)
                seen_T2 = self._splits.seen(part_T, self._low).clip(max=seen)
                seen_R2 = np.repeat(seen_T2, group, 0).astype(np.int32)
                self._parts.append((slice(first, first + len(part_T)), seen, hidden, seen_R2))
        return self._parts
