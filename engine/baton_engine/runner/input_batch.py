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

from baton_engine.attention.interface import StepArrays
from baton_engine.config.buckets import SHORT_ROW
from baton_engine.interface import Row, Sample
from baton_engine.runner.block_tables import BlockTables, Table
from baton_engine.runner.draw_columns import DrawColumns
from baton_engine.runner.int_arrays import NONE, Ints, ints_of, run_indexes
from baton_engine.sampling.metadata import (
    Columns,
)
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout
from baton_protocol.sampling import SamplingParams

HostArrays = StepArrays[npt.NDArray[Any]]


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
        self._draws = DrawColumns()
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
        starts_R = ints_of([row.start for row in rows])
        if columns != self._columns or 0 in columns.keys:
            self._lay_out(columns, starts_R)
        rows = [rows[row] for row in self._order]
        samples = [samples[sample] for sample in self._sample_order]
        return self._fill(rows, starts_R[self._order_R], samples, place_of_S)

    def _lay_out(self, columns: _Columns, starts_R: Ints) -> None:
        """Give the rows new lines, and keep what is known of each."""
        self._columns = _Columns([], [], [], [], [])  # in case of an error
        counts_R, numbers_R = ints_of(columns.counts), ints_of(columns.numbers)
        order_R = np.lexsort((-starts_R, np.searchsorted([1, SHORT_ROW], counts_R)))
        before = {key: line for line, key in enumerate(self._keys)}
        self._keys = [columns.keys[row] for row in order_R.tolist()]
        self.tables.rearrange(ints_of([before.get(key, -1) if key else -1 for key in self._keys]))
        self._order_R, self._line_of_R = order_R, np.argsort(order_R)
        self._order, self._lines_R = order_R.tolist(), np.arange(len(order_R))
        self._counts_R = counts_R[order_R]
        self._starts_R1 = np.concatenate([[0], self._counts_R.cumsum()]).astype(np.int32)
        self._nothing_T = np.full(self._starts_R1[-1], -1, np.int32)
        numbers_of_line_R = numbers_R[order_R]
        begins_R = (numbers_R.cumsum() - numbers_R)[order_R]
        sample_order_S = run_indexes(begins_R, numbers_of_line_R)
        self._place_of_S = np.argsort(sample_order_S)
        self._row_of_S = self._lines_R.repeat(numbers_of_line_R)
        self._sample_order = order = sample_order_S.tolist()
        params = [columns.params[sample] for sample in order]
        choices = [columns.choices[sample] for sample in order]
        owners = [self._keys[row] for row in self._row_of_S.tolist()]
        self._draws.lay_out(owners, choices, params)
        self._bound = [
            index for index, sample_params in enumerate(params) if _changes_logits(sample_params)
        ]
        self._asking = {
            index: sample_params.logprobs
            for index, sample_params in enumerate(params)
            if sample_params.logprobs is not None
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
            positions_T = run_indexes(starts_R, self._counts_R)
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
            rows_S, positions_S = self._row_of_S, ints_of([sample.position for sample in samples])
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
        after_R = ints_of([-1 if place is None else place for place in after])
        waits_R = after_R >= 0
        awaits_T = np.full(total, -1, np.int32)
        awaits_T[self._starts_R1[1:][waits_R] - 1] = place_of_S[after_R[waits_R]]
        return awaits_T

    def _changed(self, samples: list[Sample]) -> Sequence[int]:
        """The samples that change logits: by their parameters, or in this step."""
        now = [
            index
            for index, sample in enumerate(samples)
            if sample.banned
            or sample.penalty_counts
            or sample.matcher is not None
            or sample.own is not None
        ]
        return sorted({*self._bound, *now}) if now else self._bound


def _changes_logits(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.allowed_token_ids is not None
