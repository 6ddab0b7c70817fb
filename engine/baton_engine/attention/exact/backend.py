"""Paged attention with torch's operators and kernels that numba compiles: the backend for CPUs, on
which its bits do not depend on the batch, and the twin of Triton's kernels.

In: the step's batch and, per layer, rotated q and k, and v. Out: attention outputs. The new K and V
are written to the pool first, because a token attends to itself through the cache.

The output of a query depends only on the query and on the keys and values that it sees, to the last
bit. It does not depend on the other rows of the step, on how a prompt is cut into pieces, or on
blocks that rows share:

- Keys are divided into splits of a fixed number of blocks, counted from position 0. The weighted
  sum of V is one product per split, and the splits are added in ascending order.
- A key that a query does not see has a weight of exactly 0, so reading more keys than a query sees
  changes nothing.
- The library's products give each row of a matrix the same bits for any number of rows, columns and
  matrices, from a certain number of rows on (see `batched_products`).

One-token rows (decode) and the tokens of short prompts are computed together, and read K and V in
their blocks. Those that begin with the same splits read these once (see `decode_rows`). Longer rows
(prefill) are computed one by one, some tokens and kv heads at a time. Their K and V are copied from
the blocks into one matrix before they are multiplied.

Shapes: T tokens of the step or of a piece, N query heads, K kv heads, G = N / K, H head_dim, S keys
of a split, C splits, L = C S keys, M rows of a product (tokens times G), X matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton_engine.attention.exact.batched_products import BatchedProducts, added
from baton_engine.attention.exact.decode_rows import (
    Places,
    decode_rows,
    has_kernels,
    shared_prefixes,
    similar,
)
from baton_engine.attention.exact.pages import SIZES, PagedKV, Sizes
from baton_engine.attention.exact.splits import Hidden, Splits
from baton_engine.attention.interface import KVSlots, StepBatch, TableRow, table_rows
from baton_engine.config.model_config import AttentionSpec
from baton_engine.cpu_kernels.elementwise import add_splits, can_add_splits
from baton_engine.kv.kv_pool import TorchMemory

# Tokens of a prompt that are computed at a time. More would compute more scores of keys that a
# token does not see, and fewer would take more calls.
PIECE_TOKENS = 64


class TorchAttention:
    """`specs` has one entry per layer."""

    def __init__(
        self, memory: TorchMemory, specs: Sequence[AttentionSpec], sizes: Sizes = SIZES
    ) -> None:
        self._kv = PagedKV(memory, specs[0].num_heads, sizes)
        self._specs = tuple(specs)
        self._products = BatchedProducts.for_heads(
            *(self._kv.pool.dtype, self._kv.device, self._kv.head_dim),
            keys=Splits(self._kv.block_size, None).keys,
        )

    @property
    def exact(self) -> bool:
        return self._kv.device.type == "cpu" and self._products.exact

    @property
    def recordable(self) -> bool:
        return False

    def begin(self, batch: StepBatch) -> TorchStep:
        return TorchStep(self._kv, self._products, self._specs, batch)


class Group(Protocol):
    """Queries that are computed together, at `places` of the step."""

    @property
    def places(self) -> Places: ...

    def attend(self, layer: int, q_TNH: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Outputs [T, N, H] of these queries. Their K and V must be in the pool already."""
        ...


class TorchStep:
    def __init__(
        self,
        kv: PagedKV,
        products: BatchedProducts,
        specs: Sequence[AttentionSpec],
        batch: StepBatch,
    ) -> None:
        self._kv = kv
        self._specs = specs
        self._slots = [group.slots_T for group in batch.device.groups]
        self._targets = [kv.slot_rows(group.slots_T) for group in batch.host.groups]
        # Layers of one KV group with one window have the same plan.
        kinds = [(group, spec.window) for (group, _), spec in zip(kv.places, specs, strict=True)]
        plans = {
            (group, window): _groups(
                *(kv, products, table_rows(batch, group)),
                *(Splits(kv.block_size, window), specs[0].num_heads),
            )
            for group, window in dict.fromkeys(kinds)
        }
        self._plans = [plans[kind] for kind in kinds]

    def slots(self, layer: int) -> KVSlots:
        group, index = self._kv.places[layer]
        return KVSlots(self._kv.pool, index, self._slots[group])

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
            self._kv.store(layer, self._targets[self._kv.places[layer][0]], k_TKH, v_TKH)
        plan, spec = self._plans[layer], self._specs[layer]
        if len(plan) == 1:  # the usual decode step: no copy
            return plan[0].attend(layer, q_TNH, spec)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        for group in plan:
            out_TNH[group.places] = group.attend(layer, q_TNH[group.places], spec)
        return out_TNH


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

    def attend(self, layer: int, q_TNH: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        kv, (tokens, heads, dim) = self._kv, q_TNH.shape
        by_head = (tokens, kv.num_kv_heads, heads // kv.num_kv_heads, dim)
        k_KLH = kv.gather_k(layer, self._pages).view(kv.num_kv_heads, -1, dim)
        v_KLH = kv.gather_v(layer, self._pages).view(kv.num_kv_heads, -1, dim)
        # A weight of 0 does not remove NaN, and memory that no query sees may hold it.
        v_KLH[:, : self._seen.start] = 0.0
        v_KLH[:, self._seen.stop :] = 0.0
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        add_in_place = can_add_splits(out_TNH)
        out_KTGH = out_TNH.view(by_head).transpose(0, 1)
        q_KTGH = q_TNH.reshape(by_head).transpose(0, 1)
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
                # Padding here is cheaper than in each product.
                q_XMH = F.pad(q_XMH, (0, 0, 0, self._products.rows(rows) - rows))
                k_XLH, v_XLH = k_KLH[some, :seen], v_KLH[some, :seen]
                if q_TNH.device.type == "cpu":
                    weights_XCMS = self._products.weights(
                        q_XMH, k_XLH, spec, seen_R2, self._splits.keys
                    )
                    sums_XMCH = self._products.multiplied(weights_XCMS, v_XLH)
                    if add_in_place:
                        add_splits(sums_XMCH.transpose(1, 2), out_TNH[part], by_head[2], head)
                        continue
                    out_XMH = added(sums_XMCH)
                else:
                    scores_XML = self._products.scores(q_XMH, k_XLH, spec)
                    if hidden is not None:
                        hidden.hide(scores_XML[:, :rows])
                    out_XMH = added(self._products.sums(self._splits.weights(scores_XML), v_XLH))
                out_KTGH[some, part] = out_XMH[:, :rows].view(q_XTGH.shape)
        return out_TNH

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


def _groups(
    kv: PagedKV,
    products: BatchedProducts,
    rows: Sequence[TableRow],
    splits: Splits,
    num_heads: int,
) -> list[Group]:
    """The groups of a step, for all layers with the same window."""
    found: list[Group] = []
    ones: list[TableRow] = []
    places: list[int] = []
    begin = 0
    kernels = has_kernels(kv, products)
    for row in rows:
        pairs = row.count * (row.start + row.count)
        if row.count == 1 or (kernels and pairs <= kv.sizes.max_pairs):
            ones += (TableRow(row.start + index, 1, row.blocks) for index in range(row.count))
            places += range(begin, begin + row.count)
        else:
            found.append(PromptPiece(kv, products, row, begin, splits))
        begin += row.count
    most = max(1, kv.sizes.max_scores // (num_heads * splits.keys))
    for members, shared in shared_prefixes(ones, splits):
        starts_R = np.asarray([ones[index].start for index in members])
        sizes = splits.of(starts_R) + 1 - splits.lowest(starts_R)
        for group in similar(sizes.tolist(), most):
            some = [members[index] for index in group]
            rows_of, at = [ones[index] for index in some], [places[index] for index in some]
            found.append(decode_rows(kv, products, rows_of, at, splits, shared))
    return found
