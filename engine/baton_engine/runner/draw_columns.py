"""The parameters of each line's draw as columns of numbers, kept from step to step.

Shapes: S samples, N some lines.
"""

from __future__ import annotations

import numpy as np

from baton_engine.runner.int_arrays import Ints, ints_of
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
from baton_protocol.sampling import SamplingParams


class DrawColumns:
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
        source_S = ints_of([self._source(*each) for each in zip(names, params, strict=True)])
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
