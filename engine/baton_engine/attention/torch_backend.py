"""Paged attention with torch's own operators.

In: the step's batch and, per layer, rotated q and k, and v. Out: attention outputs. The new K and V
are written to the pool first, because a token attends to itself through the cache.

One-token rows (decode) are computed in padded groups, with a few batched calls per group and layer
(see `torch_decode`, and `cascade` for rows that share blocks). Longer rows (prefill) are computed
one by one, from a copy of their blocks. The lengths in a group differ by at most a factor of two,
except for short rows, so padding never dominates.

Shapes: T tokens of the step, N query heads, K kv heads, H head_dim, B block size, R rows of a
group, M blocks of its longest row, S keys of its longest row, L layers, P blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.attention.cascade import PrefixedRows, shared_prefixes
from baton_engine.attention.cpu_bf16 import multiplies_bf16, prompt_attention
from baton_engine.attention.interface import KVSlots, StepBatch, TableRow, table_rows
from baton_engine.attention.kv_views import (
    TUNED,
    PagedKV,
    Positions,
    Table,
    Tuning,
    Visible,
)
from baton_engine.attention.torch_decode import (
    DecodeRows,
    Places,
    decode_rows,
    hush_beta_notice,
    places_of,
    reads_in_place,
    rows_in_place,
)
from baton_engine.config.model_config import AttentionSpec
from baton_engine.kv.kv_pool import TorchMemory

# Maximum number of blocks in a padded group of several rows. It bounds the workspace (8192 blocks
# of 16 tokens with 8 kv heads of 128 in bf16 are 512 MiB), but not the length of a single row.
MAX_GROUP_BLOCKS = 8192
# Rows of up to this number of blocks share a group whatever their lengths: padding costs less than
# another call.
SMALL_ROW_BLOCKS = 16


def can_compute(specs: Sequence[AttentionSpec]) -> bool:
    """Whether TorchAttention supports these layers."""
    return all(spec.plain for spec in specs)


class TorchAttention:
    """The fastest attention backend for CPUs, and the reference for kernels on any device.

    `specs` has one entry per layer. Scores are scaled by 1 / sqrt(H) and have no soft cap (see
    `can_compute`). Outputs depend on the batch by rounding; those of `exact.ExactAttention` do not.
    """

    def __init__(
        self, memory: TorchMemory, specs: Sequence[AttentionSpec], tuning: Tuning = TUNED
    ) -> None:
        assert can_compute(specs), specs
        hush_beta_notice()
        self._kv = PagedKV(memory, specs[0].num_heads, tuning)
        self._windows = [spec.window for spec in specs]

    @property
    def exact(self) -> bool:
        return False

    @property
    def recordable(self) -> bool:
        return False

    def begin(self, batch: StepBatch) -> TorchStep:
        return TorchStep(self._kv, self._windows, batch)


@dataclass(frozen=True, slots=True)
class _One:
    """A one-token row. `place` is its token in the step, or its row in a group of rows that share
    blocks. `seen` is the range of its block table that is read for it."""

    place: int
    row: TableRow
    seen: range


@dataclass(frozen=True, slots=True)
class _Piece:
    """A longer row at tokens [begin, end) of the step, which reads `keys` keys.

    `source` has the pages to copy, or is None if all keys are the step's own K and V. Without a
    `mask`, attention is causal.
    """

    begin: int
    end: int
    keys: int
    source: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Division:
    """The groups and pieces of the step, for all layers of a KV group with the same window."""

    groups: list[DecodeRows]
    pieces: list[_Piece]


class TorchStep:
    def __init__(self, kv: PagedKV, windows: Sequence[int | None], batch: StepBatch) -> None:
        self._kv = kv
        self._block_size = kv.block_size
        bf16 = kv.device.type == "cpu" and kv.pool.dtype == torch.bfloat16
        self._products = bf16 and multiplies_bf16()
        self._slots = [group.slots_T for group in batch.device.groups]
        self._targets = [kv.slot_rows(group.slots_T) for group in batch.host.groups]
        kinds = [(group, window) for (group, _), window in zip(kv.places, windows, strict=True)]
        divisions = {
            (group, window): self._divide(table_rows(batch, group), window)
            for group, window in dict.fromkeys(kinds)
        }
        self._divisions = [divisions[kind] for kind in kinds]

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
        division = self._divisions[layer]
        if len(division.groups) == 1 and not division.pieces:  # the usual decode step: no copy
            return division.groups[0].attend(layer, q_TNH)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        for group in division.groups:
            out_TNH[group.places] = group.attend(layer, q_TNH[group.places])
        for piece in division.pieces:
            part = slice(piece.begin, piece.end)
            out_TNH[part] = self._prefill(layer, piece, q_TNH[part], k_TKH[part], v_TKH[part])
        return out_TNH

    def _prefill(
        self,
        layer: int,
        piece: _Piece,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
    ) -> torch.Tensor:
        kv_heads, dim = self._kv.num_kv_heads, self._kv.head_dim
        if piece.source is None:
            k_KSH, v_KSH = k_TKH.transpose(0, 1), v_TKH.transpose(0, 1)
        else:
            kv = self._kv.gather(layer, piece.source).view(2, kv_heads, -1, dim)
            k_KSH, v_KSH = kv[:, :, : piece.keys]
        if self._products and piece.mask is not None:
            return prompt_attention(q_TNH, k_KSH, v_KSH, piece.mask)
        tokens, heads, dim = q_TNH.shape
        group = heads // kv_heads
        q_KGTH = q_TNH.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
        shape = (kv_heads, group, k_KSH.shape[1], dim)
        out_KGTH = F.scaled_dot_product_attention(
            q_KGTH,
            k_KSH[:, None].expand(shape),
            v_KSH[:, None].expand(shape),
            attn_mask=piece.mask,
            is_causal=piece.mask is None,
        )
        return out_KGTH.permute(2, 0, 1, 3).reshape(tokens, heads, dim)

    def _divide(self, rows: Sequence[TableRow], window: int | None) -> _Division:
        division, ones = _Division([], []), []
        begin = 0
        for row in rows:
            if row.count == 1:
                ones.append(_One(begin, row, self._blocks_seen(row, window)))
            else:
                division.pieces.append(self._piece(row, begin, window))
            begin += row.count
        if window is None and reads_in_place(self._kv):
            ones = self._take_prefixed(ones, division)
        for group in _similar(ones):
            keys = self._keys(group, window)
            division.groups.append(decode_rows(self._kv, _places(group), *keys))
        return division

    def _take_prefixed(self, ones: list[_One], division: _Division) -> list[_One]:
        """Add groups of rows that share enough blocks to `division`. Returns the other rows."""
        taken: set[int] = set()
        rows = [one.row for one in ones]
        for shared in shared_prefixes(rows, self._block_size, self._kv.tuning):
            members = [ones[index] for index in shared.rows]
            own = [
                _One(index, one.row, one.seen[shared.num_blocks :])
                for index, one in enumerate(members)
            ]
            parts = [
                rows_in_place(self._kv, _places(group), *self._keys(group, None))
                for group in _similar(own)
            ]
            blocks_M = members[0].row.blocks[: shared.num_blocks]
            group = PrefixedRows(self._kv, _places(members), blocks_M, parts, len(members))
            division.groups.append(group)
            taken.update(shared.rows)
        return [one for index, one in enumerate(ones) if index not in taken]

    def _keys(self, group: Sequence[_One], window: int | None) -> tuple[Table, Visible]:
        """The rows' block tables [R, M], padded to the longest, and the keys each row sees
        [R, S]."""
        table_RM = np.zeros((len(group), max(len(one.seen) for one in group)), np.int64)
        for line, one in enumerate(group):
            table_RM[line, : len(one.seen)] = one.row.blocks[one.seen.start : one.seen.stop]
        starts = np.asarray([one.row.start for one in group])
        firsts = np.asarray([one.seen.start * self._block_size for one in group])
        keys = int((starts - firsts).max()) + 1
        keys_RS = firsts[:, None] + np.arange(keys)
        return table_RM, _visible(starts[:, None], keys_RS, window)

    def _piece(self, row: TableRow, begin: int, window: int | None) -> _Piece:
        tokens = row.count
        queries = np.arange(row.start, row.start + tokens)
        seen = self._blocks_seen(row, window)
        keys = np.arange(seen.start * self._block_size, row.start + tokens)
        mask = source = None
        if row.start:
            source = self._kv.page_rows(row.blocks[None, seen.start : seen.stop])
        if self._products or row.start or (window is not None and window < tokens):
            mask = self._kv.additive(_visible(queries[:, None], keys[None, :], window))
        return _Piece(begin, begin + tokens, len(keys), source, mask)

    def _blocks_seen(self, row: TableRow, window: int | None) -> range:
        """The range of the row's block table whose keys its tokens may see."""
        first = 0 if window is None else max(0, row.start + 1 - window)
        end = row.start + row.count
        return range(first // self._block_size, -(-end // self._block_size))


def _visible(queries: Positions, keys: Positions, window: int | None) -> Visible:
    """Whether each query sees each key. Both are given as positions and broadcast."""
    visible: Visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def _similar(ones: Sequence[_One]) -> Iterator[Sequence[_One]]:
    """Divide rows into groups of consecutive rows with similar lengths."""
    first = longest = shortest = 0
    for index, one in enumerate(ones):
        size = len(one.seen)
        longest_then = max(longest, size)
        shortest_then = min(shortest, size) if index > first else size
        uneven = longest_then > max(2 * shortest_then, SMALL_ROW_BLOCKS)
        too_many = longest_then * (index - first + 1) > MAX_GROUP_BLOCKS
        if index > first and (uneven or too_many):
            yield ones[first:index]
            first, longest_then, shortest_then = index, size, size
        longest, shortest = longest_then, shortest_then
    if ones:
        yield ones[first:]


def _places(group: Sequence[_One]) -> Places:
    return places_of([one.place for one in group])
