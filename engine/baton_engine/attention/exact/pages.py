"""Views of the paged pool as rows that torch's operators select by index, and copies of pages.

In: the pool; block tables. Out: one view per layer, made once, and the indexes of a step. The
indexes are the same for all layers of a KV group, because each layer's view begins at that layer's
K or V.

Shapes: T tokens, R rows, M blocks, K kv heads, H head_dim, V numbers of a head of v, B block size,
P blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.attention.layer_kv import LayerKV
from baton_engine.config.model_config import AttentionSpec
from baton_engine.config.step_sizes import KEYS_COPIED, SCORES_AT_ONCE
from baton_engine.cpu_kernels.codes import CodeRows, can_move, gather, scatter
from baton_engine.cpu_kernels.eight_bits import rounded_rows
from baton_engine.kv.eight_bits import encoded, factors
from baton_engine.kv.staging import stage

Positions = npt.NDArray[np.int64]
Table = npt.NDArray[np.signedinteger[Any]]  # blocks
Visible = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes on which attention's speed depends, but no output."""

    # Elements of K that are copied at a time for one-token rows.
    max_copied: int = KEYS_COPIED
    # Scores that exist at a time.
    max_scores: int = SCORES_AT_ONCE
    # Tokens times keys of a prompt whose tokens are computed like one-token rows. Up to this size
    # that was faster, in float32 up to any size.
    max_pairs: int = 96 * 96
    # Tokens of a row, such as drafts, that are computed like one-token rows with any number of
    # keys: 5 to 17 tokens took 0.5 to 0.86 of the time, and 33 the same, in bfloat16.
    few_tokens: int = 24


SIZES = Sizes()


class FieldRows:
    """K or V of layers of one shape as rows of numbers. A page is one (block, head) of shape
    [B, H], a slot one token's [H] in it.

    A row of a view begins at any multiple of `unit` numbers, so rows may overlap: blocks of K and V
    need not be a whole number of pages. Codes have their `exponents` as rows, too.
    """

    def __init__(
        self,
        layers_PKBH: Mapping[int, torch.Tensor],
        exponents_PKB1: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        first = next(iter(layers_PKBH.values()))
        self._block, self._head, self._slot, _ = first.stride()
        self.shape = tuple(first.shape[1:])  # K, B, H
        _, block, size = self.shape
        self._page_unit = math.gcd(self._block, self._head)
        self._slot_unit = math.gcd(self._page_unit, self._slot)
        # torch moves codes of fp8 as bytes only.
        layers = [
            (layer, kv.view(torch.int8) if kv.element_size() == 1 else kv)
            for layer, kv in layers_PKBH.items()
        ]
        self.pages = {layer: _rows(kv, self._page_unit, block * size) for layer, kv in layers}
        self.slots = {layer: _rows(kv, self._slot_unit, size) for layer, kv in layers}
        self.exponents = FieldRows(exponents_PKB1) if exponents_PKB1 else None

    @property
    def steps(self) -> tuple[int, ...]:
        """Fields with the same steps have the same indexes."""
        return self._block, self._head, self._slot, self.shape[1] * self.shape[2]

    def page_rows(self, table_RM: Table) -> Table:
        """Indexes of the pages in each of `pages`, in the order [R, K, M], flattened."""
        heads = np.arange(self.shape[0])[:, None] * self._head
        rows_RKM = table_RM.astype(np.int64)[:, None] * self._block + heads
        found: Table = rows_RKM.reshape(-1) // self._page_unit
        return found

    def slot_rows(self, slots_T: Positions) -> Table:
        """Indexes in each of `slots` of (token, kv head), in order [T, K], flattened. A token
        without a slot gets one of block 0, which belongs to no request."""
        blocks, offsets = np.divmod(slots_T.clip(min=0), self.shape[1])
        tokens = blocks * self._block + offsets * self._slot
        rows_TK = tokens[:, None] + np.arange(self.shape[0]) * self._head
        found: Table = rows_TK.reshape(-1) // self._slot_unit
        return found


@dataclass(frozen=True, slots=True)
class RowIndexes:
    """Indexes of the same pages or slots in FieldRows of K, of V, and of the exponents of both."""

    k: torch.Tensor
    v: torch.Tensor
    exponents: torch.Tensor | None = None


class PagedKV:
    """The pool by page and by slot, for layers of one shape, that of `spec`. `layers` has the views
    of each. `dtype` is that of stored and gathered numbers, by default the pool's. `rounds` is that
    of KVSlots."""

    def __init__(
        self,
        layers: Mapping[int, LayerKV],
        spec: AttentionSpec,
        sizes: Sizes = SIZES,
        *,
        dtype: torch.dtype | None = None,
        rounds: bool = False,
    ) -> None:
        first = next(iter(layers.values()))
        self._code = None if first.exponents is None else first.k_PKBH.dtype
        self.sizes = sizes
        self.rounds = rounds
        self.layers = layers
        self.device = first.k_PKBH.device
        self.dtype = dtype or first.k_PKBH.dtype
        self.num_heads = spec.num_heads
        self.num_kv_heads, self.block_size, self.head_dim = first.k_PKBH.shape[1:]
        self.value_dim = spec.value_dim
        # Whether attention has weights by split (see cpu_kernels.softmax).
        self.by_split = spec.latent and self.device.type == "cpu"
        self._latent = spec.latent
        kept = {layer: kv.exponents for layer, kv in layers.items() if kv.exponents}
        self._k = FieldRows(
            {layer: kv.k_PKBH for layer, kv in layers.items()},
            {layer: each.k_PKB1 for layer, each in kept.items()},
        )
        self._v = self._k
        if not self._latent:
            self._v = FieldRows(
                {layer: kv.v_PKBV for layer, kv in layers.items()},
                {layer: each.v_PKB1 for layer, each in kept.items()},
            )
        self._copies = [torch.empty(0, dtype=self.dtype, device=self.device)] * 2

    def page_rows(self, table_RM: Table) -> RowIndexes:
        """Indexes of pages, for gather_k() and gather_v()."""
        return self._indexes(lambda field: field.page_rows(table_RM))

    def slot_rows(self, slots_T: Positions) -> RowIndexes:
        """Indexes of the slots of each token, for store()."""
        return self._indexes(lambda field: field.slot_rows(slots_T))

    def _indexes(self, rows_of: Callable[[FieldRows], Table]) -> RowIndexes:
        k = v = stage(rows_of(self._k), self.device)
        if self._v.steps != self._k.steps:
            v = stage(rows_of(self._v), self.device)
        if self._k.exponents is None:
            return RowIndexes(k, v)
        # Those of K and V have the same steps.
        return RowIndexes(k, v, stage(rows_of(self._k.exponents), self.device))

    def store(
        self, layer: int, targets: RowIndexes, k_TKH: torch.Tensor, v_TKV: torch.Tensor | None
    ) -> None:
        """Store K and V at the indexes `targets` from slot_rows()."""
        if self.rounds:
            k_TKH = rounded_rows(k_TKH)
            v_TKV = None if v_TKV is None else rounded_rows(v_TKV)
        self._store(self._k, layer, targets.k, targets.exponents, k_TKH)
        if v_TKV is not None:
            self._store(self._v, layer, targets.v, targets.exponents, v_TKV)

    def _store(
        self,
        field: FieldRows,
        layer: int,
        rows: torch.Tensor,
        exponent_rows: torch.Tensor | None,
        numbers_TKH: torch.Tensor,
    ) -> None:
        numbers_XH = numbers_TKH.reshape(-1, numbers_TKH.shape[-1])
        if field.exponents is not None and exponent_rows is not None and self._code is not None:
            if can_move(numbers_XH.dtype, self.device, numbers_XH.shape[1]):
                found = self._codes(field.slots, field.exponents.slots, layer, rows, exponent_rows)
                scatter(numbers_XH[:, None].contiguous(), found)
                return
            codes_XH, exponents_X1 = encoded(numbers_XH, self._code)
            field.exponents.slots[layer].index_copy_(0, exponent_rows, exponents_X1)
            numbers_XH = codes_XH.view(torch.int8)
        field.slots[layer].index_copy_(0, rows, numbers_XH)

    def gather_k(self, layer: int, rows: RowIndexes) -> torch.Tensor:
        """Copy pages of K: [pages, B, H]. The copy is valid until the next call. Its memory is
        reused: filling fresh memory of 32 MB and more took twice as long, because malloc maps it
        from the kernel each time."""
        return self._gather(0, self._k, layer, rows.k, rows.exponents)

    def gather_v(self, layer: int, rows: RowIndexes) -> torch.Tensor:
        """Copy pages of V: [pages, B, V]; otherwise like gather_k()."""
        pages = self._gather(1, self._v, layer, rows.v, rows.exponents)
        return pages[..., : self.value_dim].contiguous() if self._latent else pages

    def _gather(
        self,
        which: int,
        field: FieldRows,
        layer: int,
        rows: torch.Tensor,
        exponent_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        pages = field.pages[layer]
        size = len(rows) * pages.shape[1]
        if len(self._copies[which]) < size:
            self._copies[which] = self._copies[which].new_empty(size)
        copy = self._copies[which][:size].view(len(rows), *field.shape[1:])
        if field.exponents is None or exponent_rows is None or self._code is None:
            torch.index_select(pages, 0, rows, out=copy.flatten(1))
            return copy
        exponents = field.exponents.pages
        if can_move(self.dtype, self.device, copy.shape[-1]):
            gather(self._codes(field.pages, exponents, layer, rows, exponent_rows), copy)
            return copy
        codes = pages.index_select(0, rows).view(self._code).view(copy.shape)
        chosen = exponents[layer].index_select(0, exponent_rows)
        return copy.copy_(codes).mul_(factors(chosen[..., None], self.dtype))

    def _codes(
        self,
        codes: Mapping[int, torch.Tensor],
        exponents: Mapping[int, torch.Tensor],
        layer: int,
        rows: torch.Tensor,
        exponent_rows: torch.Tensor,
    ) -> CodeRows:
        fp8 = self._code == torch.float8_e4m3fn
        return CodeRows(codes[layer], rows, exponents[layer], exponent_rows, fp8)


def _rows(layer_PKBH: torch.Tensor, unit: int, size: int) -> torch.Tensor:
    """The view [rows, size] of a layer whose rows begin every `unit` numbers."""
    last = sum(
        (count - 1) * step
        for count, step in zip(layer_PKBH.shape, layer_PKBH.stride(), strict=True)
    )
    rows = (last + 1 - size) // unit + 1
    return layer_PKBH.as_strided((rows, size), (unit, 1))
