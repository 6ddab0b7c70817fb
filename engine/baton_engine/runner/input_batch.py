"""The step's input: the scheduler's rows as arrays, in one form for prompts and decoding sequences.

In: a step's rows. Out: a StepInput, with the rows' tokens, positions and block tables (see
attention.interface.StepArrays) and what to sample.

From one decode step to the next each sequence advances by one token, so nearly all of it stays
valid. Rows have lines, which are kept from step to step by the rows' keys: a known row adds only
its new blocks, and its samples keep their parameters. Reading one attribute of 256 rows as a column
takes 3 us; a loop with a few calls per row takes ten times as long. One-token rows come first, then
those of up to SHORT_ROW tokens (see `lines`), each longest first, as attention prefers.

Shapes: R rows, T tokens, S samples, W blocks of the widest line (of all KV groups), G KV groups,
N some lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_engine.attention.interface import GroupArrays, StepArrays
from baton_engine.config.buckets import SHORT_ROW
from baton_engine.interface import Row, Sample
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
from baton_protocol.layout import KVLayout
from baton_protocol.sampling import SamplingParams

Ints = npt.NDArray[np.int64]
HostArrays = StepArrays[npt.NDArray[Any]]
Table = npt.NDArray[np.int32]
LEAST_WIDTH = 64
NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What to sample in a step. `samples` are in the order of the lines.

    `hidden_S` is the token of the step after which each sample comes. `place_of_S` is the index in
    `samples` of each sample in the order of the call. `changed` are the samples that change logits,
    and `asking` maps each sample that wants logprobs to the number of most likely tokens.
    """

    samples: Sequence[Sample]
    hidden_S: Ints
    place_of_S: Ints
    columns_6S: Columns
    filtered: bool
    changed: Sequence[int]
    asking: dict[int, int]
    one_each: bool  # whether each row has one sample


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step's input. `rows` are in the order of the lines; `line_of_R` is the line of each row of
    the call. Valid until the next call of InputBatch.take(). `begun` are the blocks in which the
    step writes the first token but not the last."""

    rows: Sequence[Row]
    line_of_R: Ints
    arrays: HostArrays
    awaits: bool  # whether a token is a sample of the previous step
    max_query_len: int
    max_seq_len: int
    begun: list[BlockId]
    sampling: StepSamples


@dataclass(frozen=True, slots=True)
class _Columns:
    """One attribute of each row or sample, in the order of the call. Rows whose columns are equal
    to those of the step before have the same lines."""

    keys: list[int]
    counts: list[int]  # tokens
    numbers: list[int]  # samples
    choices: list[int]
    params: list[SamplingParams]


class InputBatch:
    def __init__(self, layout: KVLayout) -> None:
        self.tables = BlockTables(layout)
        self._columns = _Columns([], [], [], [], [])
        self._block_size = layout.block_size
        # By line.
        self._order_R = self._line_of_R = self._lines_R = self._counts_R = NONE
        self._starts_R1 = self._nothing_T = np.zeros(0, np.int32)
        self._order: list[int] = []
        self._keys: list[int] = []
        # By sample, in the order of the lines.
        self._place_of_S = self._row_of_S = NONE
        self._sample_order: list[int] = []
        self._draws = _DrawColumns()
        self._bound: list[int] = []  # samples whose parameters change logits
        self._asking: dict[int, int] = {}
        self._one_each = False

    def take(self, rows: Sequence[Row], place_of_S: Ints = NONE) -> StepInput:
        """The input of a step. `place_of_S` is StepSamples.place_of_S of the previous step, which
        `Row.after` refers to."""
        groups = [row.samples for row in rows]
        samples = list(chain.from_iterable(groups))
        columns = _Columns(
            [row.blocks_id for row in rows],
            list(map(len, [row.tokens for row in rows])),
            list(map(len, groups)),
            [each.choice for each in samples],
            [each.params for each in samples],
        )
        starts_R = _ints([row.start for row in rows])
        if columns != self._columns or 0 in columns.keys:
            self._lay_out(columns, starts_R)
        rows = [rows[row] for row in self._order]
        samples = [samples[sample] for sample in self._sample_order]
        return self._fill(rows, starts_R[self._order_R], samples, place_of_S)

    def _lay_out(self, columns: _Columns, starts_R: Ints) -> None:
        """Give the rows new lines, and keep what is known of each."""
        self._columns = _Columns([], [], [], [], [])  # in case of an error
        counts_R, numbers_R = _ints(columns.counts), _ints(columns.numbers)
        order_R = np.lexsort((-starts_R, np.searchsorted([1, SHORT_ROW], counts_R)))
        before = {key: line for line, key in enumerate(self._keys)}
        self._keys = [columns.keys[row] for row in order_R.tolist()]
        self.tables.rearrange(_ints([before.get(key, -1) if key else -1 for key in self._keys]))
        self._order_R, self._line_of_R = order_R, np.argsort(order_R)
        self._order, self._lines_R = order_R.tolist(), np.arange(len(order_R))
        self._counts_R = counts_R[order_R]
        self._starts_R1 = np.concatenate([[0], self._counts_R.cumsum()]).astype(np.int32)
        self._nothing_T = np.full(self._starts_R1[-1], -1, np.int32)
        numbers_of_line_R = numbers_R[order_R]
        begins_R = (numbers_R.cumsum() - numbers_R)[order_R]
        sample_order_S = _runs(begins_R, numbers_of_line_R)
        self._place_of_S = np.argsort(sample_order_S)
        self._row_of_S = self._lines_R.repeat(numbers_of_line_R)
        self._sample_order = order = sample_order_S.tolist()
        params = [columns.params[sample] for sample in order]
        choices = [columns.choices[sample] for sample in order]
        owners = [self._keys[row] for row in self._row_of_S.tolist()]
        self._draws.lay_out(owners, choices, params)
        self._bound = [index for index, each in enumerate(params) if _changes_logits(each)]
        self._asking = {
            index: each.logprobs for index, each in enumerate(params) if each.logprobs is not None
        }
        self._one_each = columns.numbers.count(1) == len(columns.numbers)
        self._columns = columns

    def _fill(
        self, rows: list[Row], starts_R: Ints, samples: list[Sample], place_of_S: Ints
    ) -> StepInput:
        """The input of the step, from rows and samples in the order of the lines."""
        total = int(self._starts_R1[-1])
        one_token = total == len(rows)
        lengths_R = starts_R + self._counts_R
        last_R, offset_R = np.divmod(lengths_R - 1, self._block_size)  # of the last token
        self.tables.extend(starts_R, last_R, rows)
        if one_token:
            positions_T = starts_R
            groups = self.tables.groups(self._lines_R, last_R, offset_R)
        else:
            positions_T = _runs(starts_R, self._counts_R)
            rows_T = self._lines_R.repeat(self._counts_R)
            groups = self.tables.groups(rows_T, *np.divmod(positions_T, self._block_size))
        # A block is begun if its first token is written, and its last is not.
        begun_R = (last_R * self._block_size >= starts_R) & (offset_R < self._block_size - 1)
        awaits_T = self._awaits([row.awaited_sample for row in rows], place_of_S, total)
        tokens = chain.from_iterable([row.tokens for row in rows])
        arrays = StepArrays(
            np.fromiter(tokens, np.int32, total),
            positions_T.astype(np.int32),
            self._nothing_T if awaits_T is None else awaits_T,
            self._starts_R1,
            lengths_R.astype(np.int32),
            groups,
        )
        if one_token and self._one_each:
            hidden_S, positions_S = self._lines_R, lengths_R
        else:
            rows_S, positions_S = self._row_of_S, _ints([each.position for each in samples])
            hidden_S = self._starts_R1[rows_S] + positions_S - 1 - starts_R[rows_S]
        return StepInput(
            rows,
            self._line_of_R,
            arrays,
            awaits_T is not None,
            1 if one_token else int(self._counts_R.max()),
            int(lengths_R.max()),
            self.tables.at(begun_R.nonzero()[0], last_R),
            StepSamples(
                samples,
                hidden_S,
                self._place_of_S,
                self._draws.at(positions_S),
                self._draws.filtered,
                self._changed(samples),
                self._asking,
                self._one_each,
            ),
        )

    def _awaits(self, after: list[int | None], place_of_S: Ints, total: int) -> Table | None:
        """StepArrays.awaits_T; None if no token is awaited."""
        if after.count(None) == len(after):
            return None
        after_R = _ints([-1 if each is None else each for each in after])
        waits_R = after_R >= 0
        awaits_T = np.full(total, -1, np.int32)
        awaits_T[self._starts_R1[1:][waits_R] - 1] = place_of_S[after_R[waits_R]]
        return awaits_T

    def _changed(self, samples: list[Sample]) -> Sequence[int]:
        """The samples that change logits: by their parameters, or in this step."""
        now = [
            index
            for index, each in enumerate(samples)
            if each.banned or each.penalty_counts or each.matcher is not None
        ]
        return sorted({*self._bound, *now}) if now else self._bound


class _DrawColumns:
    """The samples' parameters as columns (see `sampling.metadata`). A sample that is known by its
    row's key and its choice keeps its column."""

    def __init__(self) -> None:
        self.filtered = self._drawn = False
        self._columns_6S: Columns = np.zeros((COLUMNS, 0), np.uint32)
        self._streams_S: Streams = np.zeros(0, np.uint64)
        self._known: dict[tuple[int, int], int] = {}
        self._params: list[SamplingParams] = []

    def lay_out(self, owners: list[int], choices: list[int], params: list[SamplingParams]) -> None:
        names = list(zip(owners, choices, strict=True))
        source_S = _ints([self._source(*each) for each in zip(names, params, strict=True)])
        columns_6S = np.zeros((COLUMNS, len(params)), np.uint32)
        streams_S = np.zeros(len(params), np.uint64)
        old, new = source_S >= 0, np.flatnonzero(source_S < 0).tolist()
        columns_6S[:, old] = self._columns_6S[:, source_S[old]]
        streams_S[old] = self._streams_S[source_S[old]]
        if new:
            these = [params[sample] for sample in new]
            columns_6S[:, new] = shape_columns(these)
            streams_S[new] = streams_of(these, [choices[sample] for sample in new])
        self._columns_6S, self._streams_S, self._params = columns_6S, streams_S, params
        self._known = {name: sample for sample, name in enumerate(names) if name[0]}
        self.filtered, self._drawn = is_filtered(columns_6S), bool(columns_6S[0].any())

    def _source(self, name: tuple[int, int], params: SamplingParams) -> int:
        """The sample's index before, or -1. A key with other parameters is another request."""
        before = self._known.get(name, -1)
        return before if before >= 0 and self._params[before] == params else -1

    def at(self, positions_S: Ints) -> Columns:
        """The columns of samples at these positions."""
        if self._drawn:
            keys = keys_at(self._streams_S, positions_S.astype(np.uint64))
            self._columns_6S[KEY_A], self._columns_6S[KEY_B] = keys
        return self._columns_6S


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


def _changes_logits(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.allowed_token_ids is not None


def _ints(numbers: Sequence[int]) -> Ints:
    return np.fromiter(numbers, np.int64, len(numbers))


def _runs(begins_R: Ints, counts_R: Ints) -> Ints:
    """Concatenate the ranges [begins[i], begins[i] + counts[i])."""
    before_R = counts_R.cumsum() - counts_R
    return np.arange(counts_R.sum()) + np.repeat(begins_R - before_R, counts_R)
