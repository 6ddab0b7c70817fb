"""Paged attention behind a small interface, and its torch implementation.

In: the step's rows and, per layer, rotated q and k, and v. Out: attention outputs; the new K and V
are written into the pool first, so that a token sees itself through the cache.

The torch twin computes one-token rows (decode) in padded groups, one batched call per group, and
longer rows (prefill) one by one. Rows of a group differ in length by at most a factor of two, so
padding never dominates.

Shapes: T tokens of the step, N query heads, K kv heads, G = N / K, H head_dim, B block size,
R rows of a group, M blocks of its longest row, S = M * B, L layers, P blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.api import Row
from baton_engine.torch_memory import TorchMemory, stage

# Blocks that one padded group may gather: bounds the workspace (8192 blocks of 16 tokens, 8 kv
# heads of 128 in bf16 are 512 MiB), not the length of a single row.
MAX_GROUP_BLOCKS = 8192
# Below this many blocks a row joins any group: padding costs less than another call.
SMALL_ROW_BLOCKS = 16


class StepAttention(Protocol):
    """Attention of one step, called by each layer in turn."""

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        """Store K and V, then attend; [T, N, H]."""
        ...


class AttentionBackend(Protocol):
    def begin(self, rows: Sequence[Row]) -> StepAttention:
        """Prepare a step whose tokens are the rows' tokens one after another. One-token rows that
        stand together are computed together."""
        ...


class TorchAttention:
    """The naive twin: gathers a row's blocks, then torch's scaled dot-product attention."""

    def __init__(self, memory: TorchMemory, num_heads: int) -> None:
        self._memory = memory
        self._num_heads = num_heads

    def begin(self, rows: Sequence[Row]) -> StepAttention:
        return TorchStep(self._memory, self._num_heads, rows)


@dataclass(frozen=True, slots=True)
class _Group:
    """One-token rows at tokens [begin, end). `source` indexes the pool's (block, layer 0, K/V,
    head) rows as [2, R, K, M] flattened; `mask` is [R, 1, 1, S], or None where rows are equal."""

    begin: int
    end: int
    length: int  # tokens of the longest row
    source: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """One longer row at tokens [begin, end), positions [start, start + end - begin). Without a
    past, `source` and `mask` are None: K and V are at hand and the mask is causal."""

    begin: int
    end: int
    start: int
    source: torch.Tensor | None
    mask: torch.Tensor | None


class TorchStep:
    def __init__(self, memory: TorchMemory, num_heads: int, rows: Sequence[Row]) -> None:
        layout = memory.layout
        self._heads = (num_heads, layout.num_kv_heads, layout.head_dim)
        self._block_size = layout.block_size
        self._device = memory.pool.device
        # The pool as rows of one (block, layer, K or V, head) and of one token in it.
        self._pages = memory.pool.view(-1, layout.block_size * layout.head_dim)
        self._slots = memory.pool.view(-1, layout.head_dim)
        self._page_stride = 2 * layout.num_kv_heads  # pages from one layer to the next
        self._block_stride = self._page_stride * layout.num_layers
        self._targets = stage(self._slot_rows(rows), self._device)
        self._groups, self._pieces = self._divide(rows)

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        _, kv_heads, dim = self._heads
        targets = self._targets + layer * self._page_stride * self._block_size
        self._slots.index_copy_(0, targets, k_TKH.reshape(-1, dim))
        targets += kv_heads * self._block_size
        self._slots.index_copy_(0, targets, v_TKH.reshape(-1, dim))
        if len(self._groups) == 1 and not self._pieces:  # the usual decode step: no copy
            return self._decode(layer, self._groups[0], q_TNH)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        for group in self._groups:
            out_TNH[group.begin : group.end] = self._decode(layer, group, q_TNH)
        for piece in self._pieces:
            part = slice(piece.begin, piece.end)
            out_TNH[part] = self._prefill(layer, piece, q_TNH[part], k_TKH[part], v_TKH[part])
        return out_TNH

    def _decode(self, layer: int, group: _Group, q_TNH: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = self._heads
        rows = group.end - group.begin
        kv = self._gather(layer, group.source).view(2, rows, kv_heads, -1, dim)
        k_RKSH, v_RKSH = kv[:, :, :, : group.length]
        # The G query heads of a kv head stand where a query's tokens would: nothing is repeated.
        q_RKGH = q_TNH[group.begin : group.end].reshape(rows, kv_heads, heads // kv_heads, dim)
        out_RKGH = F.scaled_dot_product_attention(q_RKGH, k_RKSH, v_RKSH, attn_mask=group.mask)
        return out_RKGH.reshape(rows, heads, dim)

    def _prefill(
        self,
        layer: int,
        piece: _Piece,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
    ) -> torch.Tensor:
        heads, kv_heads, dim = self._heads
        group = heads // kv_heads
        tokens = q_TNH.shape[0]
        q_KGTH = q_TNH.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
        if piece.source is None:
            k_KSH, v_KSH = k_TKH.transpose(0, 1), v_TKH.transpose(0, 1)
        else:
            kv = self._gather(layer, piece.source).view(2, kv_heads, -1, dim)
            k_KSH, v_KSH = kv[:, :, : piece.start + tokens]
        shape = (kv_heads, group, k_KSH.shape[1], dim)
        out_KGTH = F.scaled_dot_product_attention(
            q_KGTH,
            k_KSH[:, None].expand(shape),
            v_KSH[:, None].expand(shape),
            attn_mask=piece.mask,
            is_causal=piece.mask is None,
        )
        return out_KGTH.permute(2, 0, 1, 3).reshape(tokens, heads, dim)

    def _gather(self, layer: int, source: torch.Tensor) -> torch.Tensor:
        return self._pages.index_select(0, source + layer * self._page_stride)

    def _slot_rows(self, rows: Sequence[Row]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Index of each (token, head) in `_slots`, for K of layer 0."""
        blocks, offsets = [], []
        for row in rows:
            positions = np.arange(row.start, row.start + len(row.tokens))
            first = row.start // self._block_size
            used = np.asarray(row.blocks[first : positions[-1] // self._block_size + 1], np.int64)
            blocks.append(used[positions // self._block_size - first])
            offsets.append(positions % self._block_size)
        kv_heads = np.arange(self._heads[1])
        pages = np.concatenate(blocks)[:, None] * self._block_stride + kv_heads[None, :]
        targets = pages * self._block_size + np.concatenate(offsets)[:, None]
        return targets.reshape(-1)

    def _divide(self, rows: Sequence[Row]) -> tuple[list[_Group], list[_Piece]]:
        groups: list[_Group] = []
        pieces: list[_Piece] = []
        begin = index = 0
        while index < len(rows):
            count = self._group_size(rows, index)
            if count:
                groups.append(self._group(rows[index : index + count], begin))
                begin += count
                index += count
                continue
            row = rows[index]
            pieces.append(self._piece(row, begin))
            begin += len(row.tokens)
            index += 1
        return groups, pieces

    def _group_size(self, rows: Sequence[Row], first: int) -> int:
        """How many rows from `first` on are one-token rows of similar length; 0 if not even one."""
        longest = shortest = 0
        count = 0
        for row in rows[first:]:
            if len(row.tokens) != 1:
                break
            size = self._blocks_used(row)
            longest_then = max(longest, size)
            shortest_then = min(shortest, size) if count else size
            uneven = longest_then > max(2 * shortest_then, SMALL_ROW_BLOCKS)
            if count and (uneven or longest_then * (count + 1) > MAX_GROUP_BLOCKS):
                break
            longest, shortest, count = longest_then, shortest_then, count + 1
        return count

    def _group(self, rows: Sequence[Row], begin: int) -> _Group:
        lengths = np.asarray([row.start + 1 for row in rows])
        table_RM = np.zeros((len(rows), max(map(self._blocks_used, rows))), np.int64)
        for line, row in enumerate(rows):
            used = self._blocks_used(row)
            table_RM[line, :used] = row.blocks[:used]
        longest = int(lengths.max())
        mask = None
        if lengths.min() != longest:
            mask = self._additive(np.arange(longest)[None, :] < lengths[:, None])[:, None, None]
        source = stage(self._page_rows(table_RM), self._device)
        return _Group(begin, begin + len(rows), longest, source, mask)

    def _piece(self, row: Row, begin: int) -> _Piece:
        end = begin + len(row.tokens)
        if row.start == 0:
            return _Piece(begin, end, 0, None, None)
        table_M = np.asarray(row.blocks[: self._blocks_used(row)], np.int64)
        source = stage(self._page_rows(table_M[None, :]), self._device)
        keys = np.arange(row.start + len(row.tokens))
        mask = self._additive(keys[None, :] <= keys[row.start :, None])
        return _Piece(begin, end, row.start, source, mask)

    def _additive(self, allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> torch.Tensor:
        """0 where allowed, else -inf: torch would make this of a bool mask in each layer."""
        mask = torch.zeros(allowed.shape, dtype=self._pages.dtype, device=self._device)
        return mask.masked_fill_(stage(~allowed, self._device), -torch.inf)

    def _page_rows(
        self, table_RM: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Pages of K and V of layer 0, ordered [2, R, K, M] and flattened."""
        kv_heads = self._heads[1]
        heads = np.arange(2 * kv_heads).reshape(2, 1, kv_heads, 1)
        return (table_RM[None, :, None, :] * self._block_stride + heads).reshape(-1)

    def _blocks_used(self, row: Row) -> int:
        return -(-(row.start + len(row.tokens)) // self._block_size)
