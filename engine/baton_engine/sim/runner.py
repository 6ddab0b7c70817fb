"""Compute a simulated step: real KV bytes in a real pool, and tokens that depend on all of them.

In: the same rows as for the torch runner. Out: sampled ids, after the time that the timing model
gives. numpy only.

Arithmetic is modulo 2^64. Token i of a sequence has a state s[i]. Its KV is the words
s[i] * spread. A weighted sum of these words (its digest) is added to D[i], the digest of all KV up
to token i:

    s[i] = mix(D[i-1], token[i], i)          D[i] = D[i-1] + weight[i] * digest(KV of token i)

A group of layers (see KVLayout) has KV and weights of its own: group g multiplies s[i] by
salts[g] and weight[i] by shares[g]. If it has a window w, D[i-1] and D[i] leave out its tokens
before i - w + 1, as attention does at token i.

All multipliers are odd, so one changed word anywhere changes D and therefore every later token. D
is computed from the pool and never stored per request. Foreign or missing bytes give other tokens,
as they would in a real model, and it does not matter which steps computed the KV. The next token is
a function of D and of the Sample (see `sim.model`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton_engine.interface import Row, RowResult
from baton_engine.sim.memory import SimMemory
from baton_engine.sim.model import VECTOR_SIZE, Vocabulary, numbers_after
from baton_engine.sim.timing import Timing
from baton_engine.vectors import answer_of
from baton_protocol.pooling import Pooling


@dataclass(frozen=True, slots=True)
class SimStep:
    """A step that is computed at launch. read() waits until the step's simulated end."""

    results: list[RowResult]
    wait: Callable[[float], None]
    ends: float

    def read(self) -> list[RowResult]:
        self.wait(self.ends)
        return self.results


class SimRunner:
    """A Runner over SimMemory. `clock` and `sleep` are in seconds. A row with the token `poison`
    ends the process at once, without any clean-up, to simulate a crash. With `pooling`, rows ask
    for vectors, of VECTOR_SIZE numbers or of one per class."""

    def __init__(
        self,
        memory: SimMemory,
        vocabulary: Vocabulary,
        timing: Timing,
        *,
        poison: int | None = None,
        pooling: Pooling = "",
        classes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.memory = memory
        self._vocabulary = vocabulary
        self._pooling = pooling
        self._classes = classes
        self._timing = timing
        self._poison = poison
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0  # when the last launched step ends, on `clock`
        self._sampled: list[int] = []  # ids that it sampled

    def launch(self, rows: Sequence[Row]) -> SimStep:
        """Compute the step at once; the samples of the step before are known already. Its simulated
        time begins when that step's time ends, and read() waits for its end."""
        rows = [self._with_sampled(row) for row in rows]
        if self._poison is not None and any(self._poison in row.tokens for row in rows):
            os._exit(os.EX_SOFTWARE)
        begins = max(self._clock(), self._free_at)
        self._free_at = begins + self._timing.step_ms(rows) / 1000
        results = [self._compute(row) for row in rows]
        self._sampled = [sampled.id for result in results for sampled in result.samples]
        return SimStep(results, self._wait, self._free_at)

    def _wait(self, until: float) -> None:
        left_s = until - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def _with_sampled(self, row: Row) -> Row:
        """The row with the token that it awaited."""
        if row.awaited_sample is None:
            return row
        return msgspec.structs.replace(
            row, tokens=[*row.tokens[:-1], self._sampled[row.awaited_sample]]
        )

    def _compute(self, row: Row) -> RowResult:
        words = self._vocabulary
        digests = self.memory.extend(row.tokens, row.start, row.blocks)
        first = row.start + 1
        samples = tuple(words.says(digests[each.position - first], each) for each in row.samples)
        if row.pooling is not None:
            numbers = numbers_after(digests[-1], self._classes or VECTOR_SIZE)
            return RowResult(vector=answer_of(numbers, self._pooling, row.pooling))
        if row.prompt is None:
            return RowResult(samples)
        places = enumerate(zip(digests, row.prompt.targets, strict=False), start=row.start + 1)
        return RowResult(
            samples,
            tuple(
                words.expects(digest, position, target, row.prompt.top)
                for position, (digest, target) in places
            ),
        )
