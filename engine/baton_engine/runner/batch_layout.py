"""A step's rows, read column by column, and what the step gives back.

In: rows as the engine makes them. Out: columns of those that are plain decode rows (one token, one
sample, and of the logits nothing is said beyond temperature, top-k, top-p and min-p), or the layout
of rows of all kinds. Of 256 rows an attribute takes 3 us so, and a loop with a few calls for each
ten times that.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.interface import Launched, Ready, Row, RowResult, Sample, Sampled
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows of a plain decode step, in the order of the call. `after_R` is the sample of the step
    before that a row's token is, -1 where it is in `tokens_R`; None if no row waits."""

    rows: Sequence[Row]
    samples: list[Sample]
    tokens_R: Ints
    starts_R: Ints
    after_R: Ints | None
    keys: list[int]
    choices: list[int]
    params: list[SamplingParams]


def plain_rows(rows: Sequence[Row]) -> PlainRows | None:
    """None unless all rows look like plain decode rows; what their parameters say is looked at
    once per request (`says_nothing`)."""
    try:
        tokens = [token for row in rows for (token,) in [row.tokens]]
        samples = [sample for row in rows for (sample,) in [row.samples]]
    except ValueError:  # some row has not one of each
        return None
    asking = [row for row in rows if row.prompt]
    bound = [each for each in samples if each.banned or each.seen or each.matcher is not None]
    if asking or bound:
        return None
    return PlainRows(
        rows,
        samples,
        ints(tokens),
        ints([row.start for row in rows]),
        after_of([row.after for row in rows]),
        [row.key for row in rows],
        [each.choice for each in samples],
        [each.params for each in samples],
    )


def says_nothing(params: SamplingParams) -> bool:
    """Whether all that these parameters ask for is a draw from logits as they are."""
    return params.logprobs is None and not params.logit_bias and params.allowed_token_ids is None


def after_of(after: Sequence[int | None]) -> Ints | None:
    """The samples waited for, -1 where none is; None if none is at all."""
    waiting = len(after) - after.count(None)
    if not waiting:
        return None
    if waiting == len(after):
        return np.array(after, np.int64)
    return ints([-1 if each is None else each for each in after])


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of any kinds as a step computes them, `order[i]` of the call i-th: one-token rows first,
    by length, so that the attention backend finds those of similar length side by side."""

    rows: list[Row]
    order: list[int]
    starts_R: Ints
    counts_R: Ints  # tokens
    ends_R: Ints  # of its tokens among those of the step

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Layout:
        starts_R, counts_R = ints([row.start for row in rows]), _lengths([r.tokens for r in rows])
        order_R = np.lexsort((-starts_R, counts_R > 1))
        order = order_R.tolist()
        counts_R = counts_R[order_R]
        laid_out = [rows[index] for index in order]
        return cls(laid_out, order, starts_R[order_R], counts_R, counts_R.cumsum())

    def tokens(self) -> Ints:
        tokens = chain.from_iterable([row.tokens for row in self.rows])
        return np.fromiter(tokens, np.int64, int(self.ends_R[-1]))

    def positions(self) -> Ints:
        return _runs(self.starts_R, self.counts_R)

    def begun(self, block_size: int) -> list[BlockId]:
        """The blocks that rows begin to fill and leave partly empty."""
        reach_R = self.starts_R + self.counts_R
        index_R = (reach_R - 1) // block_size
        begun_R = (index_R * block_size >= self.starts_R) & (reach_R % block_size > 0)
        places = np.flatnonzero(begun_R).tolist()
        return [self.rows[place].blocks[index_R[place]] for place in places]

    def sample_places(self) -> Ints:
        """Of each sample, in the order of the call, its number in the order of the layout."""
        counts_R = _lengths([row.samples for row in self.rows])
        begins_R = counts_R.cumsum() - counts_R
        place_of_R = np.argsort(self.order)
        return _runs(begins_R[place_of_R], counts_R[place_of_R])


def ints(numbers: Collection[int]) -> Ints:
    return np.fromiter(numbers, np.int64, len(numbers))


def plain_results(ids: Iterable[int]) -> list[RowResult]:
    """Of rows with one sample each."""
    return [RowResult((Sampled(id),)) for id in ids]


class PendingStep:
    """A step on CUDA: what it gives is being computed and copied until `done`."""

    def __init__(self, finish: Callable[[], list[RowResult]], device: torch.device) -> None:
        self._finish = finish
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(device))

    def read(self) -> list[RowResult]:
        self._done.synchronize()
        return self._finish()


def launched(finish: Callable[[], list[RowResult]], device: torch.device) -> Launched:
    """What `launch` gives: on a CPU all is computed by now, and read before memory is used
    again."""
    return Ready(finish()) if device.type == "cpu" else PendingStep(finish, device)


def _lengths(lists: Iterable[Sized]) -> Ints:
    return ints([len(each) for each in lists])


def _runs(begins_R: Ints, counts_R: Ints) -> Ints:
    """begins[0], begins[0] + 1, ... counts[0] of them, then those of the next."""
    before_R = counts_R.cumsum() - counts_R
    return np.arange(counts_R.sum()) + np.repeat(begins_R - before_R, counts_R)
