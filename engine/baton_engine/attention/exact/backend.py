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
their blocks. Those that begin with the same splits read these once (see `row_groups`). Longer rows
(prefill) are computed one by one, some tokens and kv heads at a time. Their K and V are copied from
the blocks into one matrix before they are multiplied.

Shapes: T tokens of the step or of a piece, N query heads, K kv heads, H head_dim, V numbers of a
head of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from baton_engine.attention.exact.batched_products import BatchedProducts
from baton_engine.attention.exact.decode_rows import decode_rows, has_kernels
from baton_engine.attention.exact.pages import SIZES, PagedKV, Sizes
from baton_engine.attention.exact.places import Places
from baton_engine.attention.exact.prompt_piece import PromptPiece
from baton_engine.attention.exact.row_groups import group_by_length, group_by_prefix
from baton_engine.attention.exact.splits import Splits
from baton_engine.attention.interface import KVSlots, StepBatch, TableRow, table_rows
from baton_engine.config.model_config import AttentionSpec
from baton_engine.kv.kv_pool import TorchMemory


class TorchAttention:
    """`specs` has one entry per layer."""

    def __init__(
        self, memory: TorchMemory, specs: Sequence[AttentionSpec], sizes: Sizes = SIZES
    ) -> None:
        self._kv = PagedKV(memory, specs, sizes)
        self._specs = tuple(specs)
        self._products = BatchedProducts.for_heads(
            *(self._kv.dtype, self._kv.device, self._kv.head_dim),
            value_dim=self._kv.value_dim,
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

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        spec: AttentionSpec,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs [T, N, V] of these queries. Their K and V must be in the pool already."""
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
        views = self._kv.layers[layer]
        return KVSlots(views.k_PKBH, views.v_PKBV, self._slots[self._kv.places[layer][0]])

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKV: torch.Tensor | None,
        *,
        stored: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not stored:
            self._kv.store(layer, self._targets[self._kv.places[layer][0]], k_TKH, v_TKV)
        plan, spec = self._plans[layer], self._specs[layer]
        assert spec.sinks == (sinks_N is not None)
        if len(plan) == 1:  # the usual decode step: no copy
            return plan[0].attend(layer, q_TNH, spec, sinks_N)
        shape = (*q_TNH.shape[:2], spec.value_dim)
        out_TNV = torch.empty(shape, dtype=q_TNH.dtype, device=q_TNH.device)
        for group in plan:
            out_TNV[group.places] = group.attend(layer, q_TNH[group.places], spec, sinks_N)
        return out_TNV


def _groups(
    kv: PagedKV,
    products: BatchedProducts,
    rows: Sequence[TableRow],
    splits: Splits,
    num_heads: int,
) -> list[Group]:
    """The groups of a step, for all layers with the same window."""
    groups: list[Group] = []
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
            groups.append(PromptPiece(kv, products, row, begin, splits))
        begin += row.count
    most = max(1, kv.sizes.max_scores // (num_heads * splits.keys))
    for members, shared in group_by_prefix(ones, splits):
        starts_R = np.asarray([ones[index].start for index in members])
        sizes = splits.of(starts_R) + 1 - splits.lowest(starts_R)
        for group in group_by_length(sizes.tolist(), most):
            some = [members[index] for index in group]
            rows_of, at = [ones[index] for index in some], [places[index] for index in some]
            groups.append(decode_rows(kv, products, rows_of, at, splits, shared))
    return groups
