"""Drafter: the drafts of a step's decoding sequences.

In: sequences of which one known token is not computed. Out: for each the ids to compute after it,
or none. A proposer may return any ids: here they end before the first that cannot matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from baton_engine.scheduling.sequence import Sequence
from baton_engine.speculation.proposer import Proposer
from baton_engine.speculation.step_cost import StepCost


class Drafter:
    """`most` is the largest number of drafts of a sequence in a step. If `adaptive`, there are
    fewer where they would cost more time than they save, by `clock` (seconds)."""

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.cost = StepCost()
        self._proposer = proposer
        self._most = most
        self._vocab_size = vocab_size
        self._adaptive = adaptive

    def clock(self) -> float:
        return self._clock()

    def draft(self, sequences: Seq[Sequence]) -> list[Seq[int]]:
        """The drafts of each sequence. Sequences that still compute their prompt get none."""
        lengths = self._lengths(sequences)
        asked = [place for place, length in enumerate(lengths) if length > 0]
        drafts: list[Seq[int]] = [()] * len(sequences)
        if not asked:
            return drafts
        proposals = self._proposer.propose(
            [sequences[place] for place in asked], [lengths[place] for place in asked]
        )
        for place, ids in zip(asked, proposals, strict=True):
            drafts[place] = self._useful(sequences[place], ids[: lengths[place]])
        return drafts

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._proposer.forget(sequence)

    def note_step(self, tokens: int, seconds: float) -> None:
        """A step of decoding sequences alone, with `tokens` tokens, took `seconds`."""
        self.cost.note(tokens, seconds)

    def _lengths(self, sequences: Seq[Sequence]) -> list[int]:
        least_rate = self.cost.least_rate(max(1, len(sequences))) if self._adaptive else 0.0
        return [self._length(sequence, least_rate) for sequence in sequences]

    def _length(self, sequence: Sequence, least_rate: float) -> int:
        """With drafts, a step yields at most one token more than these."""
        acceptance, known = sequence.acceptance, sequence.known
        most = min(self._most, sequence.max_len - known - 1)
        if acceptance is None or not sequence.state.prompt_done or most <= 0:
            return 0
        return acceptance.length(most, least_rate, known) if self._adaptive else most

    def _useful(self, sequence: Sequence, ids: Seq[int]) -> Seq[int]:
        """The ids before the first that is none of the vocabulary, ends the choice, or does not
        match its grammar: no sample after it could be used."""
        stops, matcher = sequence.state.stops, sequence.matcher
        matcher = matcher and matcher.copy()
        for number, id in enumerate(ids):
            if not 0 <= id < self._vocab_size or id in stops:
                return ids[:number]
            if matcher is not None and (not matcher.accept((id,)) or matcher.stopped):
                return ids[:number]
        return ids
