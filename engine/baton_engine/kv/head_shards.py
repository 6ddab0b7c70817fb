"""The head shards of blocks: which bytes of a block each of them has, for reads and writes.

In: the pool, and a group of layers, which says what a layer keeps. Out: copies between one shard of
whole blocks and a buffer, on a CPU or on a device.

Head shard s of a block has rows [s * K / S, (s + 1) * K / S) of each field in each layer: one
contiguous piece of the block per layer and field. The bytes after the last layer, which belong to
no field, are divided into S pieces as well.

Shapes: P blocks with block 0 (padding), L layers for which a block has room, K heads of a field,
S head shards, F fields of the same size, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from baton_protocol.layout import KVField, KVLayout

# Types to copy bytes with; the widest is the fastest.
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

Bytes = npt.NDArray[np.uint8]


def widest_word(*sizes: int) -> torch.dtype:
    """The widest type of which each of these numbers of bytes is a multiple."""
    return next(word for word in WORDS if math.gcd(*sizes) % word.itemsize == 0)


class HeadShards:
    """The shards of all blocks of `group`, and of groups whose layers keep the same fields."""

    def __init__(self, pool: torch.Tensor, layout: KVLayout, group: int) -> None:
        shards, layers = layout.kv_shards, layout.layer_slots(group)
        # Fields of the same size are copied as one: how many, and the bytes of each in a layer.
        runs = [
            (len(list(run)), layout.block_size * size)
            for size, run in groupby(layout.group_fields[group], key=_token_bytes)
        ]
        used = layers * layout.layer_bytes(group)
        unused = layout.block_bytes - used
        word = torch.uint8
        if pool.device.type != "cpu":
            sizes = (*(size for _, size in runs), unused)
            word = widest_word(*(size // shards for size in sizes))
        self._parts = [_Part(pool[:, :used], layers, runs, shards, word)]
        if unused:
            rest = _Part(pool[:, used:], 1, [(1, unused)], shards, word, used // shards)
            self._parts.append(rest)

    def pieces(self, rows: Bytes, shard: int) -> list[tuple[Bytes, Bytes]]:
        """Views of the same pieces in a buffer [blocks, bytes of a shard] and in the pool: [blocks,
        L, F, bytes] and [P, L, F, bytes]."""
        return [pair for part in self._parts for pair in part.pieces(rows, shard)]

    def gather(self, chosen: torch.Tensor, shard: int) -> torch.Tensor:
        """One head shard of some blocks on the device, as bytes [blocks, bytes]."""
        parts = [part.gather(chosen, shard) for part in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def scatter(self, moved: torch.Tensor, chosen: torch.Tensor, shard: int) -> None:
        """The reverse: write the bytes [blocks, bytes] of one head shard."""
        for part in self._parts:
            part.scatter(moved, chosen, shard)


class _Part:
    """Consecutive bytes of blocks that are divided in the same way in each of `layers` layers.
    `runs` are how many fields of one size follow each other, and their size in bytes. In a buffer
    of a shard, the part begins at byte `begin`."""

    def __init__(
        self,
        pool: torch.Tensor,
        layers: int,
        runs: Sequence[tuple[int, int]],
        shards: int,
        word: torch.dtype,
        begin: int = 0,
    ) -> None:
        self._layers, self._begin = layers, begin
        self._end = begin + pool.shape[1] // shards
        self._runs = []  # [P, L, F, S, words of a piece]
        layers_PLZ = pool.view(len(pool), layers, -1)
        first = 0
        for count, size in runs:
            last = first + count * size
            run_PLFS = layers_PLZ[:, :, first:last].view(len(pool), layers, count, shards, -1)
            self._runs.append(run_PLFS.view(word))
            first = last

    def pieces(self, rows: Bytes, shard: int) -> list[tuple[Bytes, Bytes]]:
        layers = rows[:, self._begin : self._end].reshape(len(rows), self._layers, -1)
        first, found = 0, []
        for run in self._runs:
            fields, size = run.shape[2], run.shape[4]
            last = first + fields * size
            parts = layers[:, :, first:last].reshape(*layers.shape[:2], fields, size)
            found.append((parts, run[:, :, :, shard].numpy()))
            first = last
        return found

    def gather(self, chosen: torch.Tensor, shard: int) -> torch.Tensor:
        layers = [
            run[:, :, :, shard].index_select(0, chosen).flatten(2).view(torch.uint8)
            for run in self._runs
        ]
        return (layers[0] if len(layers) == 1 else torch.cat(layers, 2)).flatten(1)

    def scatter(self, moved: torch.Tensor, chosen: torch.Tensor, shard: int) -> None:
        layers = moved[:, self._begin : self._end].reshape(len(moved), self._layers, -1)
        first = 0
        for run in self._runs:
            pool = run[:, :, :, shard]
            last = first + pool.shape[2] * pool.shape[3] * pool.element_size()
            source = layers[:, :, first:last].contiguous().view(pool.dtype)
            pool.index_copy_(0, chosen, source.view(len(moved), *pool.shape[1:]))
            first = last


def _token_bytes(field: KVField) -> int:
    return field.token_bytes
