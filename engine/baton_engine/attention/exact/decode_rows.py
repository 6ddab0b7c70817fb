"""Attention of one-token rows. Rows with a common prefix of splits read the shared keys once.

In: rows with their blocks, and per layer their queries. Out: attention outputs.

Compiled kernels read K and V in the blocks of the pool (`PagedRows`). On a CPU whose library adds
in an order that the kernels do not have, and for block and head sizes that these do not support, K
and V are copied out of their blocks (`CopiedRows`).

Prefix caching gives requests the same blocks for the same first tokens. The keys of a system prompt
are read once per layer and multiplied with the queries of all rows. The bits stay the same, because
a row of a product does not depend on the other rows (see `batched_products`).

Shapes: R rows, N query heads, K kv heads, G = N / K, H head_dim, S keys of a split, C splits,
L keys, X = R K matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from baton_engine.attention.exact.batched_products import BatchedProducts, added
from baton_engine.attention.exact.paged_products import (
    Arrays,
    Orders,
    PagedMatrices,
    can_compute,
)
from baton_engine.attention.exact.pages import PagedKV
from baton_engine.attention.exact.splits import Hidden, Splits
from baton_engine.attention.interface import TableRow
from baton_engine.config.model_config import AttentionSpec
from baton_engine.cpu_kernels.paged_attention import Part

# Tokens of a step: a slice if they are consecutive, else their indexes.
Places = slice | torch.Tensor

# Rows of up to this number of splits may share a group.
SHORT_SPLITS = 4


def places_of(indexes: Sequence[int]) -> Places:
    first, last = indexes[0], indexes[-1]
    if last - first + 1 == len(indexes):
        return slice(first, last + 1)
    return torch.tensor(indexes)


def has_kernels(kv: PagedKV, products: BatchedProducts) -> bool:
    """Whether kernels compute one-token rows."""
    shapes = kv.pool.dtype, kv.head_dim, kv.block_size
    return products.orders is not None and can_compute(*shapes)


def decode_rows(
    kv: PagedKV,
    products: BatchedProducts,
    rows: Sequence[TableRow],
    places: Sequence[int],
    splits: Splits,
    shared: int = 0,
) -> PagedRows | CopiedRows:
    """The rows at `places` of the step, whose first `shared` splits have the same blocks."""
    orders = products.orders
    if orders is not None and has_kernels(kv, products):
        return PagedRows(kv, orders, rows, places, splits, shared)
    return CopiedRows(kv, products, rows, places, splits, shared)


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
        queries = len(rows) * kv.num_heads
        rows_RKG = np.arange(queries).reshape(len(rows), kv.num_kv_heads, -1)
        seen_R2 = splits.seen(starts_R, 0) - (low_R * splits.keys)[:, None]
        self._own = PagedMatrices(
            kv.pages_of(splits.table(rows, low_R.tolist(), count)),
            rows_RKG.reshape(-1, rows_RKG.shape[2]),
            np.repeat(seen_R2.clip(min=0), kv.num_kv_heads, 0),
            split=splits.keys,
            orders=orders,
            column=shared * splits.keys,
        )
        self._common: PagedMatrices | None = None
        if shared:
            self._common = PagedMatrices(
                kv.pages_of(splits.table(rows[:1], [0], shared)),
                rows_RKG.transpose(1, 0, 2).reshape(kv.num_kv_heads, -1),
                np.tile((0, shared * splits.keys), (kv.num_kv_heads, 1)),
                split=splits.keys,
                orders=orders,
            )
        self._scores = (shared + count) * splits.keys

    def attend(self, layer: int, q_RNH: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        kv, own, common = self._kv, self._own, self._common
        q_QH = q_RNH.reshape(-1, q_RNH.shape[-1])
        out_QH = torch.empty_like(q_QH)
        # Made for each layer, because a step may have many groups.
        scores_QL = torch.empty(len(q_QH), self._scores)
        sums_QH = torch.empty(len(q_QH), kv.head_dim)
        arrays = Arrays(kv.k_pages[layer], kv.v_pages[layer], q_QH, scores_QL, sums_QH, out_QH)
        if common is None and spec.soft_cap is None:
            own.compute(Part.ALL, arrays, spec.scale)
            return out_QH.view(q_RNH.shape)
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
        return out_QH.view(q_RNH.shape)


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

    def attend(self, layer: int, q_RNH: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        kv, (rows, heads, dim) = self._kv, q_RNH.shape
        q_RKGH = q_RNH.reshape(rows, kv.num_kv_heads, heads // kv.num_kv_heads, dim)
        scores_XGL = self._scores(layer, q_RKGH, spec)
        if self._hidden is not None:
            self._hidden.hide(scores_XGL)
        sums_XGCH = self._sums(layer, self._splits.weights(scores_XGL))
        out_XGH = added(sums_XGCH)
        return out_XGH.to(q_RNH.dtype).view(rows, heads, dim)

    def _scores(self, layer: int, q_RKGH: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Scores [X, G, L] of the shared keys and of each row's own."""
        found = []
        for part, pages in self._own:
            q_XGH = q_RKGH[part].flatten(0, 1)
            k_XLH = self._kv.gather_k(layer, pages).view(len(q_XGH), -1, q_XGH.shape[-1])
            found.append(self._products.scores(q_XGH, k_XLH, spec))
        own_XGL = found[0] if len(found) == 1 else torch.cat(found)
        if self._common is None:
            return own_XGL
        rows, kv_heads, group, dim = q_RKGH.shape
        q_KMH = q_RKGH.transpose(0, 1).flatten(1, 2)
        k_KLH = self._kv.gather_k(layer, self._common).view(kv_heads, -1, dim)
        scores_KML = self._products.scores(q_KMH, k_KLH, spec)
        scores_RKGL = scores_KML.view(kv_heads, rows, group, -1).transpose(0, 1)
        return torch.cat((scores_RKGL.flatten(0, 1), own_XGL), -1)

    def _sums(self, layer: int, weights_XGCS: torch.Tensor) -> torch.Tensor:
        """Sums of V times weight [X, G, C, H], of the shared splits and of each row's own."""
        if self._common is None:
            return self._own_sums(layer, weights_XGCS, 0)
        kv_heads, dim = self._kv.num_kv_heads, self._kv.head_dim
        v_KLH = self._kv.gather_v(layer, self._common).view(kv_heads, -1, dim)
        rows, (group, splits, keys) = len(weights_XGCS) // kv_heads, weights_XGCS.shape[1:]
        weights_RKGCS = weights_XGCS.view(rows, kv_heads, group, splits, keys)
        weights_RKGCS = weights_RKGCS[..., : self.shared, :]
        weights_KMCS = weights_RKGCS.transpose(0, 1).flatten(1, 2)
        sums_KMCH = self._products.sums(weights_KMCS, v_KLH)
        sums_RKGCH = sums_KMCH.reshape(kv_heads, rows, group, -1, dim).transpose(0, 1)
        own_XGCH = self._own_sums(layer, weights_XGCS[:, :, self.shared :], self.shared)
        return torch.cat((sums_RKGCH.flatten(0, 1), own_XGCH), 2)

    def _own_sums(self, layer: int, weights_XGCS: torch.Tensor, first: int) -> torch.Tensor:
        """Sums over the rows' own splits, from split `first` on."""
        kv_heads, dim = self._kv.num_kv_heads, self._kv.head_dim
        found = []
        for part, pages in self._own:
            matrices = slice(part.start * kv_heads, part.stop * kv_heads)
            weights = weights_XGCS[matrices]
            v_XLH = self._kv.gather_v(layer, pages).view(len(weights), -1, dim)
            if self._hidden is not None:
                keys = slice(first * self._splits.keys, self._written)
                self._hidden.clear(v_XLH, matrices, keys)
            found.append(self._products.sums(weights, v_XLH))
        return found[0] if len(found) == 1 else torch.cat(found)


def similar(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Divide rows, given by their numbers of splits, into groups to pad to the longest: indexes of
    rows with similar sizes, at most `most` splits with padding. Short rows share a group whatever
    their sizes, because padding costs less than another call."""
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    group: list[int] = []
    for index in order:
        longest = sizes[group[0]] if group else 0
        uneven = longest > max(2 * sizes[index], SHORT_SPLITS)
        if group and (uneven or longest * (len(group) + 1) > most):
            yield sorted(group)
            group = []
        group.append(index)
    if group:
        yield sorted(group)


def shared_prefixes(rows: Sequence[TableRow], splits: Splits) -> list[tuple[list[int], int]]:
    """Divide rows into groups to compute together: indexes of rows, and how many leading splits
    have the same blocks in all of them. Only splits before the row's new token are shared, so each
    row has at least one split of its own. Rows that share nothing form one group."""
    if not rows:
        return []
    if splits.window is not None:
        return [(list(range(len(rows))), 0)]
    counts = [int(splits.of(row.start)) for row in rows]
    _, groups = _best(rows, splits.blocks, counts, list(range(len(rows))), 0)
    taken = {index for members, _ in groups for index in members}
    alone = [index for index in range(len(rows)) if index not in taken]
    return [(alone, 0), *groups] if alone else groups


def _best(
    rows: Sequence[TableRow], blocks: int, counts: Sequence[int], members: list[int], known: int
) -> tuple[int, list[tuple[list[int], int]]]:
    """The grouping of `members` that saves most, and its saving in splits of one row. Their first
    `known` splits are the same. Either all form one group with their common prefix, or they split
    by the next split into groups with longer prefixes."""
    if len(members) < 2:
        return 0, []

    def split_of(index: int, split: int) -> bytes:
        return rows[index].blocks[split * blocks : (split + 1) * blocks].tobytes()

    common, most = known, min(counts[index] for index in members)
    while common < most and len({split_of(index, common) for index in members}) == 1:
        common += 1
    apart: dict[bytes, list[int]] = {}
    for index in members:
        if counts[index] > common:
            apart.setdefault(split_of(index, common), []).append(index)
    parts = [_best(rows, blocks, counts, part, common + 1) for part in apart.values()]
    saved_apart, whole = sum(saved for saved, _ in parts), (len(members) - 1) * common
    if saved_apart > whole:
        return saved_apart, [group for _, groups in parts for group in groups]
    return (whole, [(members, common)]) if common else (0, [])
