"""The batch of plain decode steps, kept from step to step.

In: a step's rows. Out: arrays with one line per row: tokens, starts, block tables and sampling
parameters. From one step to the next, each request advances by one token, so nearly all arrays stay
valid. A line is filled when its row's key is new; later steps add only new blocks. Lines are
ordered longest first, as attention prefers. All advance by one token, so the order stays valid.

Shapes: R lines, W blocks of the widest line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton_engine.interface import Row
from baton_engine.runner.batch_layout import Ints, PlainRows, plain_rows, says_nothing
from baton_engine.sampling.gumbel import keys_at
from baton_engine.sampling.metadata import (
    COLUMNS,
    KEY_A,
    KEY_B,
    Columns,
    Streams,
    is_filtered,
    shape_columns,
    streams_of,
)
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams

Table = npt.NDArray[np.int32]
LEAST_WIDTH = 64
NO_ROWS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's inputs by line. Line l is row `order_R[l]` of the call. Valid until the next call of
    BatchArrays.take()."""

    rows: list[Row]
    order_R: Ints
    line_of_R: Ints  # the line of each row, the inverse of order_R
    tokens_R: Ints
    starts_R: Ints
    after_R: Ints | None
    columns_6R: Columns
    filtered: bool
    begun: list[BlockId]  # blocks in which this step writes the first token but not the last


class BatchArrays:
    def __init__(self, block_size: int) -> None:
        self.tables = BlockTables(block_size)
        self._block_size = block_size
        self._asked: tuple[list[int], list[int], list[SamplingParams]] = [], [], []
        self._line_of_key: dict[int, int] = {}
        self._params: list[SamplingParams] = []  # by line, as are all fields below
        self._choices: list[int] = []
        self._order_R = self._line_of_R = NO_ROWS
        self._columns_6R: Columns = np.zeros((COLUMNS, 0), np.uint32)
        self._streams_R: Streams = np.zeros(0, np.uint64)
        self._filtered = self._drawn = False

    def take(self, rows: Sequence[Row]) -> Batch | None:
        """Update the lines for this step and return them. Returns None, without any effect, if the
        step is not a plain decode step."""
        asked = plain_rows(rows)
        if asked is None:
            return None
        same = self._asked == (asked.keys, asked.choices, asked.params) and 0 not in asked.keys
        if not same and not self._lay_out(asked):
            return None
        return self._move(asked)

    def _lay_out(self, asked: PlainRows) -> bool:
        """Reorder the lines for other rows than before, and keep the lines of known keys. Returns
        False if a row's parameters need more than a plain draw (see says_nothing)."""
        if not all(map(says_nothing, {id(each): each for each in asked.params}.values())):
            return False
        order_R = np.argsort(-asked.starts_R, kind="stable")
        order = order_R.tolist()
        params = [asked.params[row] for row in order]
        choices = [asked.choices[row] for row in order]
        keys = [asked.keys[row] for row in order]
        source_R = self._kept(keys, params, choices)
        self._lay_out_draws(params, choices, source_R)
        self.tables.rearrange(source_R)
        self._params, self._choices = params, choices
        self._line_of_key = dict(zip(keys, range(len(keys)), strict=True))
        self._order_R, self._line_of_R = order_R, np.argsort(order_R)
        self._asked = asked.keys, asked.choices, asked.params
        return True

    def _kept(self, keys: list[int], params: list[SamplingParams], choices: list[int]) -> Ints:
        """The previous line of each line, or -1 if it is new. The same key with other parameters is
        another request."""
        before = [self._line_of_key.get(key, -1) if key else -1 for key in keys]
        for line, old in enumerate(before):
            if old >= 0 and (
                params[line] != self._params[old] or choices[line] != self._choices[old]
            ):
                before[line] = -1
        return np.array(before, np.int64)

    def _lay_out_draws(
        self, params: list[SamplingParams], choices: list[int], source_R: Ints
    ) -> None:
        columns_6R = np.zeros((COLUMNS, len(params)), np.uint32)
        streams_R = np.zeros(len(params), np.uint64)
        old, new = source_R >= 0, np.flatnonzero(source_R < 0)
        columns_6R[:, old] = self._columns_6R[:, source_R[old]]
        streams_R[old] = self._streams_R[source_R[old]]
        if len(new):
            these = [params[line] for line in new.tolist()]
            columns_6R[:, new] = shape_columns(these)
            streams_R[new] = streams_of(these, [choices[line] for line in new.tolist()])
        self._columns_6R, self._streams_R = columns_6R, streams_R
        self._filtered, self._drawn = is_filtered(columns_6R), bool(columns_6R[0].any())

    def _move(self, asked: PlainRows) -> Batch:
        order_R = self._order_R
        rows = [asked.rows[row] for row in order_R.tolist()]
        starts_R = asked.starts_R[order_R]
        if self._drawn:
            positions_R = (starts_R + 1).astype(np.uint64)  # positions of the sampled tokens
            keys = keys_at(self._streams_R, positions_R)
            self._columns_6R[KEY_A], self._columns_6R[KEY_B] = keys
        self.tables.move(starts_R, rows)
        return Batch(
            rows,
            order_R,
            self._line_of_R,
            asked.tokens_R[order_R],
            starts_R,
            None if asked.after_R is None else asked.after_R[order_R],
            self._columns_6R,
            self._filtered,
            self._begun(starts_R, rows),
        )

    def _begun(self, starts_R: Ints, rows: list[Row]) -> list[BlockId]:
        size = self._block_size
        if size == 1:
            return []
        return [
            rows[line].blocks[int(starts_R[line]) // size]
            for line in np.flatnonzero(starts_R % size == 0).tolist()
        ]


class BlockTables:
    """The block table of each line, as far as its tokens reach."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.table_RW: Table = np.zeros((0, LEAST_WIDTH), np.int32)
        self.counts_R = NO_ROWS  # number of valid blocks in each line
        self._starts_R = NO_ROWS

    def rearrange(self, source_R: Ints) -> None:
        """Make line l the previous line source_R[l], or an empty one if that is -1."""
        old = source_R >= 0
        table_RW = np.zeros((len(source_R), self.table_RW.shape[1]), np.int32)
        counts_R, starts_R = np.zeros(len(source_R), np.int64), np.zeros(len(source_R), np.int64)
        table_RW[old] = self.table_RW[source_R[old]]
        counts_R[old], starts_R[old] = self.counts_R[source_R[old]], self._starts_R[source_R[old]]
        self.table_RW, self.counts_R, self._starts_R = table_RW, counts_R, starts_R

    def move(self, starts_R: Ints, rows: list[Row]) -> None:
        """Add the new blocks of each row to its line. A row that has not advanced is copied whole:
        its step may be a retry with other blocks."""
        needed_R = starts_R // self._block_size + 1
        known_R = np.where(starts_R > self._starts_R, self.counts_R, 0)
        self._widen(int(needed_R.max()))
        lines = np.flatnonzero(known_R < needed_R)
        parts = known_R[lines].tolist(), needed_R[lines].tolist()
        for line, first, end in zip(lines.tolist(), *parts, strict=True):
            self.table_RW[line, first:end] = rows[line].blocks[first:end]
        self.counts_R, self._starts_R = needed_R, starts_R

    def slots(self) -> Ints:
        """Slot of each line's token: block * block size + offset in the block."""
        blocks_R = self.table_RW[np.arange(len(self.counts_R)), self.counts_R - 1]
        return blocks_R * np.int64(self._block_size) + self._starts_R % self._block_size

    def _widen(self, needed: int) -> None:
        width = self.table_RW.shape[1]
        if needed > width:
            wider = np.zeros((len(self.table_RW), max(needed, 2 * width)), np.int32)
            wider[:, :width] = self.table_RW
            self.table_RW = wider
