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
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from baton_engine.attention.exact.batched_products import BatchedProducts
from baton_engine.attention.exact.decode_rows import decode_rows, has_kernels
from baton_engine.attention.exact.pages import SIZES, PagedKV, RowIndexes, Sizes
from baton_engine.attention.exact.places import Places
from baton_engine.attention.exact.prompt_piece import PromptPiece
from baton_engine.attention.exact.row_groups import (
    PrefixGroup,
    group_by_length,
    group_by_prefix,
    group_by_size,
)
from baton_engine.attention.exact.splits import Splits
from baton_engine.attention.interface import KVSlots, StepBatch, TableRow, table_rows
from baton_engine.attention.layer_kv import layers_kv
from baton_engine.config.model_config import AttentionSpec
from baton_engine.kv.kv_pool import TorchMemory


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's attention, its KV group, and what it shares with layers of the same shape."""

    spec: AttentionSpec
    group: int
    kv: PagedKV
    products: BatchedProducts


class TorchAttention:
    """`specs` has one entry per layer. `dtype` is the compute dtype, by default the pool's."""

    def __init__(
        self,
        memory: TorchMemory,
        specs: Sequence[AttentionSpec],
        sizes: Sizes = SIZES,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        views, places = layers_kv(memory, specs), memory.layout.layer_places
        alike: dict[tuple[int, ...], list[int]] = {}
        for layer, spec in enumerate(specs):
            alike.setdefault(_shape(spec), []).append(layer)
        layers = {}
        for members in alike.values():
            some = {layer: views[layer] for layer in members}
            rounds = memory.layout.codec != "none"
            kv = PagedKV(some, specs[members[0]], sizes, dtype=dtype, rounds=rounds)
            products = BatchedProducts.for_heads(
                *(kv.dtype, kv.device, kv.head_dim),
                value_dim=kv.value_dim,
                keys=Splits(kv.block_size, None).keys,
            )
            for layer in members:
                layers[layer] = Layer(specs[layer], places[layer][0], kv, products)
        self._layers = [layers[layer] for layer in range(len(specs))]
        self._on_cpu = memory.pool.device.type == "cpu"

    @property
    def exact(self) -> bool:
        return self._on_cpu and all(layer.products.exact for layer in self._layers)

    @property
    def recordable(self) -> bool:
        return False

    def begin(self, batch: StepBatch) -> TorchStep:
        return TorchStep(self._layers, batch)


def _shape(spec: AttentionSpec) -> tuple[int, ...]:
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.latent


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
    def __init__(self, layers: Sequence[Layer], batch: StepBatch) -> None:
        self._layers = layers
        self._slots = [group.slots_T for group in batch.device.groups]
        self._targets, self._plans = [], []
        targets: dict[tuple[PagedKV, int], RowIndexes] = {}
        plans: dict[tuple[PagedKV, int, int | None], list[Group]] = {}
        for each in layers:
            # Layers of one shape and one KV group write to the same slots.
            place = each.kv, each.group
            if place not in targets:
                targets[place] = each.kv.slot_rows(batch.host.groups[each.group].slots_T)
            self._targets.append(targets[place])
            # If they have one window, too, they have the same plan.
            kind = *place, each.spec.window
            if kind not in plans:
                splits = Splits(each.kv.block_size, each.spec.window)
                rows = table_rows(batch, each.group)
                plans[kind] = _groups(each.kv, each.products, rows, splits)
            self._plans.append(plans[kind])

    def slots(self, layer: int) -> KVSlots:
        each = self._layers[layer]
        views = each.kv.layers[layer]
        slots_T, rounds = self._slots[each.group], each.kv.rounds
        return KVSlots(views.k_PKBH, views.v_PKBV, slots_T, views.exponents, rounds)

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
        each = self._layers[layer]
        if not stored:
            each.kv.store(layer, self._targets[layer], k_TKH, v_TKV)
        plan, spec = self._plans[layer], each.spec
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
) -> list[Group]:
    """The groups of a step, for layers of one shape and KV group with the same window."""
    groups: list[Group] = []
    ones: list[TableRow] = []
    places: list[int] = []
    begin = 0
    kernels = has_kernels(kv, products)
    for row in rows:
        pairs = row.count * (row.start + row.count)
        few = row.count <= kv.sizes.few_tokens or pairs <= kv.sizes.max_pairs
        if row.count == 1 or (kernels and few):
            ones += (TableRow(row.start + index, 1, row.blocks) for index in range(row.count))
            places += range(begin, begin + row.count)
        else:
            groups.append(PromptPiece(kv, products, row, begin, splits))
        begin += row.count
    most = max(1, kv.sizes.max_scores // (kv.num_heads * splits.keys))
    prefixes: list[PrefixGroup] = []
    for members, shared in group_by_prefix(ones, splits):
        starts_R = np.asarray([ones[index].start for index in members])
        sizes = (splits.of(starts_R) + 1 - splits.lowest(starts_R)).tolist()
        for group in group_by_length(sizes, most):
            own = max(sizes[index] for index in group) - shared
            prefixes.append(PrefixGroup([members[index] for index in group], shared, own))
    for some in group_by_size(prefixes, most) if kernels else [[each] for each in prefixes]:
        indexes = sorted(index for group in some for index in group.members)
        rank = {index: number for number, index in enumerate(indexes)}
        ranked = [replace(each, members=[rank[index] for index in each.members]) for each in some]
        rows_of, at = [ones[index] for index in indexes], [places[index] for index in indexes]
        groups.append(decode_rows(kv, products, rows_of, at, splits, ranked))
    return groups
