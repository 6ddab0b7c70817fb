"""A step's rows as columns, and the step's results.

In: rows from the engine. Out: columns of plain decode rows, or the layout of rows of any kind. A
plain decode row has one token and one sample, and its sampling uses only temperature, top-k, top-p
and min-p. Reading one attribute of 256 rows as a column takes 3 us; a loop with a few calls per row
takes ten times as long.

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
    """Rows of a plain decode step, in the order of the call.

    `after_R` is the index of the previous step's sample that is the row's token, or -1 if the token
    is in `tokens_R`. It is None if no row awaits a token. `keys` are the rows' keys (see Row.key).
    """

    rows: Sequence[Row]
    samples: list[Sample]
    tokens_R: Ints
    starts_R: Ints
    after_R: Ints | None
    keys: list[int]
    choices: list[int]
    params: list[SamplingParams]


def plain_rows(rows: Sequence[Row]) -> PlainRows | None:
    """The rows as columns, or None if a row is not a plain decode row. The caller still has to
    check the parameters with says_nothing(), once per request."""
    try:
        tokens = [token for row in rows for (token,) in [row.tokens]]
        samples = [sample for row in rows for (sample,) in [row.samples]]
    except ValueError:  # a row has no or several tokens or samples
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
    """Whether these parameters only ask for a draw from the raw logits: no logprobs, no
    logit_bias and no allowed_token_ids."""
    return params.logprobs is None and not params.logit_bias and params.allowed_token_ids is None


def after_of(after: Sequence[int | None]) -> Ints | None:
    """Indexes of the awaited samples, -1 for a row that awaits none; None if no row awaits one."""
    waiting = len(after) - after.count(None)
    if not waiting:
        return None
    if waiting == len(after):
        return np.array(after, np.int64)
    return ints([-1 if each is None else each for each in after])


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of any kind in the order in which a step computes them: `rows[i]` is row `order[i]` of
    the call. One-token rows come first, longest first, because the attention backend groups
    neighbours of similar length."""

    rows: list[Row]
    order: list[int]
    starts_R: Ints
    counts_R: Ints  # number of tokens
    ends_R: Ints  # index after the row's last token in the step's tokens

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
        """Blocks in which the step writes the first token but not the last."""
        reach_R = self.starts_R + self.counts_R
        index_R = (reach_R - 1) // block_size
        begun_R = (index_R * block_size >= self.starts_R) & (reach_R % block_size > 0)
        places = np.flatnonzero(begun_R).tolist()
        return [self.rows[place].blocks[index_R[place]] for place in places]

    def sample_places(self) -> Ints:
        """For each sample in the order of the call, its index in the order of the layout."""
        counts_R = _lengths([row.samples for row in self.rows])
        begins_R = counts_R.cumsum() - counts_R
        place_of_R = np.argsort(self.order)
        return _runs(begins_R[place_of_R], counts_R[place_of_R])


def ints(numbers: Collection[int]) -> Ints:
    return np.fromiter(numbers, np.int64, len(numbers))


def plain_results(ids: Iterable[int]) -> list[RowResult]:
    """Results of rows with one sample each."""
    return [RowResult((Sampled(id),)) for id in ids]


class PendingStep:
    """A step in flight on CUDA. read() waits until the work queued so far on the stream is done,
    then calls `finish`."""

    def __init__(self, finish: Callable[[], list[RowResult]], device: torch.device) -> None:
        self._finish = finish
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(device))

    def read(self) -> list[RowResult]:
        self._done.synchronize()
        return self._finish()


def launched(finish: Callable[[], list[RowResult]], device: torch.device) -> Launched:
    """The handle of a launched step. On a CPU the step is already computed, so its results are read
    at once, before the next step reuses the memory."""
    return Ready(finish()) if device.type == "cpu" else PendingStep(finish, device)


def _lengths(lists: Iterable[Sized]) -> Ints:
    return ints([len(each) for each in lists])


def _runs(begins_R: Ints, counts_R: Ints) -> Ints:
    """Concatenate the ranges [begins[i], begins[i] + counts[i])."""
    before_R = counts_R.cumsum() - counts_R
    return np.arange(counts_R.sum()) + np.repeat(begins_R - before_R, counts_R)
