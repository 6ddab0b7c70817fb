"""Attention of one-token rows over the paged pool: on a CPU in place, elsewhere through a copy.

In: a group of rows with their blocks, padded to the longest, and per layer their queries. Out:
attention outputs.

The copy of K and V costs more than the attention itself: it reads them once and writes them, and
they are read again. In fp32 on a CPU two sparse operators do without. Scores are a product sampled
where a row has keys, and outputs are sums of V weighted by them, an embedding bag: each key and
value is read once, where it lies. One layer of 16 rows with 176 keys of 4 kv heads of 64 took 0.8
instead of 1.5 ms, 4 rows with 2,048 keys 2.7 instead of 5.1, 8 kv heads of 128 9 instead of 40.
The sampled product has no bf16, and a dense one rounds scores to bf16: there the copy remains.

Shapes: R rows, M blocks of the longest, S keys, N query heads, K kv heads, G = N / K, H head_dim,
B block size.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.paged_kv import PagedKV, Table, Visible


class DecodeRows(Protocol):
    """One-token rows at tokens [begin, end) of the step."""

    begin: int
    end: int

    def attend(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        """[R, N, H], from keys and values that are stored already."""
        ...


def decode_rows(kv: PagedKV, begin: int, table_RM: Table, visible_RS: Visible) -> DecodeRows:
    """Rows at tokens `begin` and following. Key s of a row stands in block s // B of its table,
    which is padded with any block that was written or is zero; a row sees one key at least."""
    in_place = kv.device.type == "cpu" and kv.pool.dtype == torch.float32
    kind = RowsInPlace if in_place else GatheredRows
    return kind(kv, begin, table_RM, visible_RS)


def hush_beta_notice() -> None:
    """torch says once per process that CSR tensors are in beta: have it say so where nobody
    listens. The two operators used here are plain loops, and tested against the definition."""
    none = torch.zeros(1, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(none, none[:0], torch.zeros(0), size=(0, 1))


class GatheredRows:
    """Copies the rows' pages, then torch's scaled dot-product attention."""

    def __init__(self, kv: PagedKV, begin: int, table_RM: Table, visible_RS: Visible) -> None:
        self.begin = begin
        self.end = begin + len(table_RM)
        self._kv = kv
        self._keys = visible_RS.shape[1]
        self._source = kv.page_rows(table_RM)
        self._mask = None if visible_RS.all() else kv.additive(visible_RS[:, None, None])

    def attend(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = q_RNH.shape
        kv_heads = self._kv.num_kv_heads
        kv = self._kv.gather(layer, self._source).view(2, rows, kv_heads, -1, dim)
        k_RKSH, v_RKSH = kv[:, :, :, : self._keys]
        # The G query heads of a kv head stand where a query's tokens would: nothing is repeated.
        q_RKGH = q_RNH.reshape(rows, kv_heads, heads // kv_heads, dim)
        out_RKGH = F.scaled_dot_product_attention(q_RKGH, k_RKSH, v_RKSH, attn_mask=self._mask)
        return out_RKGH.reshape(rows, heads, dim)


class RowsInPlace:
    """Reads keys and values where they lie."""

    def __init__(self, kv: PagedKV, begin: int, table_RM: Table, visible_RS: Visible) -> None:
        self.begin = begin
        self.end = begin + len(table_RM)
        self._kv = kv
        self._scale = kv.head_dim**-0.5
        rows, keys = visible_RS.shape
        total = rows * kv.num_heads * keys
        self._slots = torch.from_numpy(_slots(kv, table_RM, visible_RS))
        self._bags = torch.arange(0, total, keys)
        self._mask = None if visible_RS.all() else kv.additive(visible_RS[:, None])
        self._scores = torch.sparse_csr_tensor(
            torch.arange(0, total + 1, keys),
            self._slots,
            torch.zeros(total, dtype=kv.pool.dtype),
            size=(rows * kv.num_heads, len(kv.k_slots[0])),
            check_invariants=False,
        )

    def attend(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = q_RNH.shape
        torch.sparse.sampled_addmm(
            *(self._scores, q_RNH.reshape(-1, dim), self._kv.k_slots[layer].t()),
            alpha=self._scale,
            beta=0.0,
            out=self._scores,  # else its indices would be copied for each layer
        )
        scores_RNS = self._scores.values().view(rows, heads, -1)
        if self._mask is not None:
            scores_RNS = scores_RNS + self._mask
        weights_RNS = scores_RNS.softmax(-1)
        out, *_ = torch.embedding_bag(
            *(self._kv.v_slots[layer], self._slots, self._bags),
            mode=0,  # sums
            per_sample_weights=weights_RNS.view(-1),
        )
        return out.view(rows, heads, dim)


def _slots(kv: PagedKV, table_RM: Table, visible_RS: Visible) -> Table:
    """Slot of each (row, query head, key), flattened. What a row does not see is its last key
    again: at hand in a cache, and no number that a weight of zero cannot undo."""
    rows, keys = visible_RS.shape
    places = np.arange(keys)
    pages_RS = table_RM[:, places // kv.block_size] * kv.block_pages
    slots_RS = pages_RS * kv.block_size + places % kv.block_size
    last_R = keys - 1 - visible_RS[:, ::-1].argmax(1)
    slots_RS = np.where(visible_RS, slots_RS, slots_RS[np.arange(rows), last_R, None])
    kv_head_N = np.arange(kv.num_heads) * kv.num_kv_heads // kv.num_heads
    slots_RNS = slots_RS[:, None] + kv_head_N[None, :, None] * kv.block_size
    return slots_RNS.reshape(-1)
