"""Attention of one-token rows over the paged pool: in place on a CPU, from a copy elsewhere.

In: a group of rows with their blocks, padded to the longest, and per layer their queries. Out:
attention outputs.

Copying K and V costs more than the attention itself: the copy reads and writes them, and attention
reads them again. In fp32 on a CPU, two sparse operators avoid the copy and read each key and value
once, in place. The scores are a sampled matrix product, computed only where a row has keys. The
outputs are weighted sums of V, computed as an embedding bag. One layer of 16 rows with 176 keys of
4 kv heads of 64 took 0.8 instead of 1.5 ms, 4 rows with 2,048 keys 2.7 instead of 5.1 ms, and with
8 kv heads of 128 9 instead of 40 ms.

The sampled product does not support bf16. There, values are read in place, and keys are copied and
multiplied (see `cpu_bf16`), a few rows at a time, so that the copy stays in the CPU's caches.

Shapes: R rows, M blocks of the longest, S keys, N query heads, K kv heads, G = N / K, X some rows'
kv heads, H head_dim, B block size.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.attention.cpu_bf16 import wide_scores
from baton_engine.attention.kv_views import PagedKV, Table, Visible

# Tokens of the step, or rows of a group: a slice if they are consecutive, else their indices.
Places = slice | torch.Tensor


def places_of(indexes: Sequence[int]) -> Places:
    """A slice if the indexes are consecutive, else a tensor of them."""
    first, last = indexes[0], indexes[-1]
    if last - first + 1 == len(indexes):
        return slice(first, last + 1)
    return torch.tensor(indexes)


class DecodeRows(Protocol):
    """One-token rows at `places` of the step's tokens."""

    places: Places

    def attend(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        """Outputs [R, N, H]. The rows' own K and V must be in the pool already."""
        ...


def reads_in_place(kv: PagedKV) -> bool:
    able = kv.device.type == "cpu" and kv.pool.dtype in (torch.float32, torch.bfloat16)
    return able and kv.tuning.in_place


def decode_rows(kv: PagedKV, places: Places, table_RM: Table, visible_RS: Visible) -> DecodeRows:
    """The rows at `places`. Key s of a row is in block s // B of its table. Tables are padded with
    any block that has been written or is zero. Each row sees at least one key."""
    kind = rows_in_place if reads_in_place(kv) else GatheredRows
    return kind(kv, places, table_RM, visible_RS)


def rows_in_place(kv: PagedKV, places: Places, table_RM: Table, visible_RS: Visible) -> RowsInPlace:
    """Same as decode_rows(), for a pool that can be read in place (see reads_in_place)."""
    kind = SampledRows if kv.pool.dtype == torch.float32 else CopiedKeys
    return kind(kv, places, table_RM, visible_RS)


def log_sum(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(scores))) over the last axis. `weights` is the softmax of `scores`: its largest
    value is exp(largest score - log sum). Takes a fifth of the time of torch's logsumexp."""
    return scores.amax(-1) - weights.amax(-1).log()


def hush_beta_notice() -> None:
    """Trigger and suppress torch's warning, once per process, that CSR tensors are in beta. The two
    operators used here are plain loops, and tests compare them with the definition."""
    none = torch.zeros(1, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(none, none[:0], torch.zeros(0), size=(0, 1))


class GatheredRows:
    """Copies the rows' pages, then calls torch's scaled dot-product attention."""

    def __init__(self, kv: PagedKV, places: Places, table_RM: Table, visible_RS: Visible) -> None:
        self.places = places
        self._kv = kv
        self._keys = visible_RS.shape[1]
        self._source = kv.page_rows(table_RM)
        self._mask = None if visible_RS.all() else kv.additive(visible_RS[:, None, None])

    def attend(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = q_RNH.shape
        kv_heads = self._kv.num_kv_heads
        kv = self._kv.gather(layer, self._source).view(2, rows, kv_heads, -1, dim)
        k_RKSH, v_RKSH = kv[:, :, :, : self._keys]
        # The G query heads of a kv head take the place of query tokens, so K and V are not
        # repeated.
        q_RKGH = q_RNH.reshape(rows, kv_heads, heads // kv_heads, dim)
        out_RKGH = F.scaled_dot_product_attention(q_RKGH, k_RKSH, v_RKSH, attn_mask=self._mask)
        return out_RKGH.reshape(rows, heads, dim)


class RowsInPlace(ABC):
    """Reads values in place. Subclasses decide how keys are read."""

    def __init__(self, kv: PagedKV, places: Places, table_RM: Table, visible_RS: Visible) -> None:
        self.places = places
        self._kv = kv
        self._scale = kv.head_dim**-0.5
        rows, keys = visible_RS.shape
        self._slots = torch.from_numpy(value_slots(kv, table_RM, visible_RS))
        self._bags = torch.arange(0, rows * kv.num_heads * keys, keys)

    def attend(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        return self._sums(layer, self._score(layer, q_RNH).softmax(-1))

    def attend_part(self, layer: int, q_RNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [R, N, H] over these keys only, and the log of the sum of their exponentials
        [R, N], which is needed to merge them with outputs over other keys."""
        scores_RNS = self._score(layer, q_RNH)
        weights_RNS = scores_RNS.softmax(-1)
        return self._sums(layer, weights_RNS), log_sum(scores_RNS, weights_RNS)

    @abstractmethod
    def _score(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        """Scores, float32 [R, N, S]; -inf for a key that the row does not see."""
        ...

    def _sums(self, layer: int, weights_RNS: torch.Tensor) -> torch.Tensor:
        """Sums of the values, weighted by `weights_RNS`; [R, N, H]."""
        v_slots = self._kv.v_slots[layer]
        out, *_ = torch.embedding_bag(
            *(v_slots, self._slots, self._bags),
            mode=0,  # sums
            per_sample_weights=weights_RNS.to(v_slots.dtype).view(-1),
        )
        return out.view(*weights_RNS.shape[:2], -1)


class SampledRows(RowsInPlace):
    """Reads keys in place, too (fp32)."""

    def __init__(self, kv: PagedKV, places: Places, table_RM: Table, visible_RS: Visible) -> None:
        super().__init__(kv, places, table_RM, visible_RS)
        rows, keys = visible_RS.shape
        total = rows * kv.num_heads * keys
        self._mask = None if visible_RS.all() else kv.additive(visible_RS[:, None])
        self._scores = torch.sparse_csr_tensor(
            torch.arange(0, total + 1, keys),
            self._slots,
            torch.zeros(total, dtype=kv.pool.dtype),
            size=(rows * kv.num_heads, len(kv.k_slots[0])),
            check_invariants=False,
        )

    def _score(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = q_RNH.shape
        torch.sparse.sampled_addmm(
            *(self._scores, q_RNH.reshape(-1, dim), self._kv.k_slots[layer].t()),
            alpha=self._scale,
            beta=0.0,
            out=self._scores,  # otherwise torch copies its indices for each layer
        )
        scores_RNS = self._scores.values().view(rows, heads, -1)
        return scores_RNS if self._mask is None else scores_RNS + self._mask


class CopiedKeys(RowsInPlace):
    """Copies the keys of a few rows at a time, or of some blocks of a long row (bf16)."""

    def __init__(self, kv: PagedKV, places: Places, table_RM: Table, visible_RS: Visible) -> None:
        rows, blocks = table_RM.shape
        # Pad to whole blocks, so that the matrices of a product are contiguous.
        seen_RS = np.zeros((rows, blocks * kv.block_size), np.bool_)
        seen_RS[:, : visible_RS.shape[1]] = visible_RS
        super().__init__(kv, places, table_RM, seen_RS)
        block_numbers = kv.num_kv_heads * kv.block_size * kv.head_dim
        most = max(1, kv.tuning.max_copied // block_numbers)
        width = min(blocks, most)
        height = max(1, most // blocks)
        self._parts = [
            _Part(
                slice(row, row + height),
                slice(block * kv.block_size, (block + width) * kv.block_size),
                kv.key_rows(table_RM[row : row + height, block : block + width]),
            )
            for row in range(0, rows, height)
            for block in range(0, blocks, width)
        ]
        self._all_see = seen_RS.shape[1] if seen_RS.all() else int(seen_RS.all(0).argmin())
        self._hidden = torch.from_numpy(~seen_RS[:, None, self._all_see :])

    def _score(self, layer: int, q_RNH: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = q_RNH.shape
        q_RKGH = q_RNH.reshape(rows, self._kv.num_kv_heads, -1, dim)
        parts = [self._score_part(layer, q_RKGH, part) for part in self._parts]
        if len(parts) == 1:
            scores_RKGS = parts[0]
        else:
            scores_RKGS = torch.empty(*q_RKGH.shape[:3], self._hidden.shape[-1] + self._all_see)
            for part, scores in zip(self._parts, parts, strict=True):
                scores_RKGS[part.rows, ..., part.keys] = scores
        scores_RNS = scores_RKGS.view(rows, heads, -1)
        # Overwrite rather than add -inf: a score of unseen memory may be NaN.
        scores_RNS[..., self._all_see :].masked_fill_(self._hidden, -torch.inf)
        return scores_RNS

    def _score_part(self, layer: int, q_RKGH: torch.Tensor, part: _Part) -> torch.Tensor:
        q_XGH = q_RKGH[part.rows].flatten(0, 1)
        k_XSH = self._kv.gather(layer, part.pages).view(len(q_XGH), -1, q_XGH.shape[-1])
        scores_XGS = wide_scores(q_XGH, k_XSH, self._scale)
        return scores_XGS.view(-1, *q_RKGH.shape[1:3], k_XSH.shape[1])


@dataclass(frozen=True, slots=True)
class _Part:
    rows: slice
    keys: slice
    pages: torch.Tensor


def value_slots(kv: PagedKV, table_RM: Table, visible_RS: Visible) -> Table:
    """Slot of each (row, query head, key), flattened. A key that the row does not see is replaced
    by the last one it sees: that is in the CPU's cache already, and its values are finite, so a
    weight of 0 removes them."""
    rows, keys = visible_RS.shape
    places = np.arange(keys)
    pages_RS = table_RM[:, places // kv.block_size] * kv.block_pages
    slots_RS = pages_RS * kv.block_size + places % kv.block_size
    last_R = keys - 1 - visible_RS[:, ::-1].argmax(1)
    slots_RS = np.where(visible_RS, slots_RS, slots_RS[np.arange(rows), last_R, None])
    kv_head_N = np.arange(kv.num_heads) * kv.num_kv_heads // kv.num_heads
    slots_RNS = slots_RS[:, None] + kv_head_N[None, :, None] * kv.block_size
    return slots_RNS.reshape(-1)
