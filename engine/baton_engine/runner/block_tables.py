"""BlockTables: the blocks of the step's lines, kept from step to step.

Shapes: R rows, T tokens, W blocks of the widest line (of all KV groups), G KV groups, N some lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_engine.attention.interface import GroupArrays
from baton_engine.interface import Row
from baton_engine.runner.int_arrays import NONE, Ints
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

Table = npt.NDArray[np.int32]
LEAST_WIDTH = 64


class BlockTables:
    """The block table of each line, as far as its tokens reach. Lines are columns, as in the
    device's tables (see `input_buffers`): the copy of a step's tables then has long runs."""

    def __init__(self, layout: KVLayout) -> None:
        self._block_size = layout.block_size
        self._groups = layout.num_groups
        self.table_WR: Table = np.zeros((LEAST_WIDTH, 0), np.int32)  # flat, see KVLayout
        self.counts_R = NONE  # number of valid entries in each line
        self._starts_R = NONE

    def rearrange(self, source_R: Ints) -> None:
        """Make line l the previous line source_R[l], or an empty one if that is -1."""
        old = source_R >= 0
        table_WR = np.zeros((len(self.table_WR), len(source_R)), np.int32)
        if old.any():
            # A quarter of the time of table_WR[:, old] = self.table_WR[:, source_R[old]].
            np.take(self.table_WR, source_R, axis=1, out=table_WR, mode="wrap")
            table_WR[:, ~old] = 0
        counts_R, starts_R = np.zeros(len(source_R), np.int64), np.zeros(len(source_R), np.int64)
        counts_R[old], starts_R[old] = self.counts_R[source_R[old]], self._starts_R[source_R[old]]
        self.table_WR, self.counts_R, self._starts_R = table_WR, counts_R, starts_R

    def extend(self, starts_R: Ints, last_R: Ints, rows: Sequence[Row]) -> None:
        """Add the new blocks of each row to its line, up to those of span `last`, which are
        `last * G` to `last * G + G - 1`. A row that has not advanced is copied whole: its step may
        be a retry with other blocks."""
        needed_R = (last_R + 1) * self._groups
        known_R = np.where(starts_R > self._starts_R, self.counts_R, 0)
        self._widen(int(needed_R.max()))
        lines = (known_R < needed_R).nonzero()[0]
        parts = known_R[lines].tolist(), needed_R[lines].tolist()
        for line, first, end in zip(lines.tolist(), *parts, strict=True):
            self.table_WR[first:end, line] = rows[line].blocks[first:end]
        self.counts_R, self._starts_R = needed_R, starts_R

    def groups(
        self, rows_T: Ints, spans_T: Ints, offsets_T: Ints
    ) -> tuple[GroupArrays[npt.NDArray[Any]], ...]:
        """Each KV group's tables, and the slots of tokens, given by their rows, spans of block_size
        tokens, and offsets in these."""
        end = int(self.counts_R.max())
        groups = []
        for group in range(self._groups):
            table_MR = self.table_WR[group : end : self._groups]
            slots_T = table_MR[spans_T, rows_T] * np.int64(self._block_size) + offsets_T
            groups.append(GroupArrays(table_MR.T, slots_T))
        return tuple(groups)

    def at(self, lines: Ints, last_R: Ints) -> list[BlockId]:
        """The blocks of span `last` of some lines."""
        places_NG = last_R[lines, None] * self._groups + np.arange(self._groups)
        blocks: list[BlockId] = self.table_WR[places_NG, lines[:, None]].reshape(-1).tolist()
        return blocks

    def _widen(self, needed: int) -> None:
        width, lines = self.table_WR.shape
        if needed > width:
            wider = np.zeros((max(needed, 2 * width), lines), np.int32)
            wider[:width] = self.table_WR
            self.table_WR = wider
