"""Divide a step into lines, which are computed in one of a few recorded sizes, and longer rows.

In: a step's input. Out: its lines and the rest. A line is a row of one new token. A short row is
one line per token: all lines have the row's blocks, and each attends to the tokens up to its own.
In each layer the KV of all tokens is stored before attention reads it, so a line sees the tokens of
the lines before it.

Shapes: R rows, T tokens, L lines, M blocks of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from baton_engine.attention.interface import GroupArrays, StepArrays
from baton_engine.config.buckets import SHORT_ROW
from baton_engine.runner.input_batch import HostArrays, StepInput
from baton_engine.runner.input_buffers import fill
from baton_engine.runner.int_arrays import NONE, Ints


@dataclass(frozen=True, slots=True)
class Lines:
    """The first tokens of a step as lines. `arrays` has a row per line, but its tables have the
    rows of the step: first those of one token, each of which is a line, then short rows.
    `rows_L` are the rows of the lines of short rows."""

    arrays: HostArrays
    rows_L: Ints

    def __len__(self) -> int:
        return len(self.arrays.tokens_T)

    def fill(self, into: HostArrays) -> None:
        """Write the lines, and padding after them."""
        fill(into, self.arrays)
        end = len(self)
        for group, source in zip(into.groups, self.arrays.groups, strict=True):
            lines = slice(end - len(self.rows_L), end)
            table_MR = source.table_RM.T
            group.table_RM.T[: len(table_MR), lines] = table_MR[:, self.rows_L]


def divide(step: StepInput, most: int, block_size: int) -> tuple[Lines | None, HostArrays | None]:
    """The lines of a step, at most `most`, and its other rows; None for an empty part. Rows stay in
    order. If there are more one-token rows than `most`, none of the step's rows is a line."""
    arrays = step.arrays
    if step.max_query_len == 1:
        return (Lines(arrays, NONE), None) if len(step.rows) <= most else (None, arrays)
    counts_R = np.diff(arrays.query_starts_R1)
    ones, short = np.count_nonzero(counts_R == 1), np.count_nonzero(counts_R <= SHORT_ROW)
    ends_R = arrays.query_starts_R1[1 : short + 1]
    rows = int(np.searchsorted(ends_R, most, "right"))
    if not rows or ones > most:
        return None, arrays
    lines = _part(arrays, slice(rows), slice(ends_R[rows - 1]), block_size)
    lines = replace(
        lines,
        query_starts_R1=np.arange(len(lines.tokens_T) + 1, dtype=np.int32),
        seq_lens_R=lines.positions_T + 1,
    )
    rest = None
    if rows < len(counts_R):
        rest = _part(arrays, slice(rows, None), slice(ends_R[rows - 1], None), block_size)
    return Lines(lines, np.arange(ones, rows).repeat(counts_R[ones:rows])), rest


def _part(arrays: HostArrays, rows: slice, tokens: slice, block_size: int) -> HostArrays:
    """Some rows of a step and their tokens, with tables as wide as their longest row."""
    lengths_R = arrays.seq_lens_R[rows]
    blocks = slice(-(-int(lengths_R.max()) // block_size))
    starts_R = arrays.query_starts_R1[rows.start :] - (tokens.start or 0)
    return StepArrays(
        arrays.tokens_T[tokens],
        arrays.positions_T[tokens],
        arrays.awaits_T[tokens],
        starts_R[: len(lengths_R) + 1],
        lengths_R,
        tuple(
            GroupArrays(group.table_RM[rows, blocks], group.slots_T[tokens])
            for group in arrays.groups
        ),
    )
