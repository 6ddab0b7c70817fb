"""Drafter: the drafts of a step's decoding sequences.

In: sequences of which one known token is not computed. Out: for each the ids to compute after it,
or none. A proposer may return any ids: here they end before the first that cannot matter.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from baton_engine.scheduling.sequence import Sequence
from baton_engine.speculation.loss_limit import LossLimit
from baton_engine.speculation.proposer import Proposer
from baton_engine.speculation.step_clock import StepClock
from baton_engine.speculation.step_cost import StepCost


class Drafter:
    """`most` is the largest number of drafts of a sequence in a step. If `adaptive`, there are
    fewer where they would cost more time than they save, by `clock`, and none of the proposer while
    `limit` is reached. The time for which the clock is stopped is lost. With `overlap`, a step is
    launched before the last one is read, but without the sequences that may have drafts: so one for
    which there is no guess for some steps is not asked for a while."""

    def __init__(
        self,
        proposer: Proposer | None,
        most: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        overlap: bool = False,
        clock: StepClock | None = None,
        limit: LossLimit | None = None,
    ) -> None:
        self._clock = clock or StepClock()
        self._limit = limit
        self._stopped = 0.0  # seconds of the clock's stops that note_drafts() has not returned
        self.cost = StepCost()
        self._proposer = proposer
        self._most = most
        self._vocab_size = vocab_size
        self._adaptive = adaptive
        self._overlap = overlap

    def clock(self) -> float:
        return self._clock()

    def draft(self, sequences: Seq[Sequence]) -> list[Seq[int]]:
        """The drafts of each sequence: the tokens that its grammar allows alone, or else those of
        the proposer. Sequences that still compute their prompt get none."""
        drafts: list[Seq[int]] = [self._forced(sequence) for sequence in sequences]
        lengths = self._lengths(sequences)
        asked = [
            place
            for place, length in enumerate(lengths)
            if length > 0 and not drafts[place] and self._proposer is not None
        ]
        if asked and self._proposer is not None:
            before = self._clock.left_out
            proposals = self._proposer.propose(
                [sequences[place] for place in asked], [lengths[place] for place in asked]
            )
            self._note_stop(self._clock.left_out - before)
            for place, ids in zip(asked, proposals, strict=True):
                drafts[place] = self._useful(sequences[place], ids[: lengths[place]])
        if self._overlap:
            for place, sequence in enumerate(sequences):
                if not drafts[place] and sequence.state.prompt_done:
                    self._pause(sequence, asked=lengths[place] > 0)
        return drafts

    def _forced(self, sequence: Sequence) -> Seq[int]:
        """They are right, so as many as permitted are worth their time."""
        matcher, acceptance = sequence.matcher, sequence.acceptance
        if acceptance is None:
            return ()
        most = 0 if matcher is None else self._most_of(sequence)
        ids = matcher.forced()[:most] if matcher is not None and most > 0 else ()
        forced = self._useful(sequence, ids)
        acceptance.forced = bool(forced)
        return forced

    def _pause(self, sequence: Sequence, *, asked: bool) -> None:
        """A sequence gets no drafts: if it pauses, steps need not wait for its tokens."""
        if self._adaptive and asked and sequence.acceptance is not None:
            sequence.acceptance.note_no_guess(sequence.known)
        sequence.set_launch_limit()

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if self._proposer is not None:
            self._proposer.forget(sequence)

    def note_step(self, tokens: int, seconds: float) -> None:
        """A step of decoding sequences alone, with `tokens` tokens, took `seconds`."""
        self.cost.note(tokens, seconds)
        if self._limit is not None:
            self._limit.note_step(seconds)

    def note_drafts(self, sequences: int, drafted: int, accepted: int) -> float:
        won = self.cost.seconds_won(sequences, drafted, accepted)
        if self._limit is not None:
            self._limit.note_won(won)
        won, self._stopped = won - self._stopped, 0.0
        return won

    def _note_stop(self, seconds: float) -> None:
        self._stopped += seconds
        if self._limit is not None:
            self._limit.note_won(-seconds)

    def _lengths(self, sequences: Seq[Sequence]) -> list[int]:
        most = [self._most_of(sequence) for sequence in sequences]
        if not self._adaptive:
            return most
        if self._limit is not None and self._limit.reached:
            for sequence in sequences:
                if sequence.acceptance is not None:
                    sequence.acceptance.pause(sequence.known)
        able = [
            (sequence.acceptance, sequence.known, length)
            for sequence, length in zip(sequences, most, strict=True)
        ]
        chances = [
            chance
            for acceptance, known, length in able
            if acceptance is not None
            for chance in acceptance.chances(length, known)
        ]
        count = max(1, len(sequences))
        least_rate, least_chance = self.cost.least_rate(count), self.cost.least_rate(count, chances)
        return [
            0
            if acceptance is None or length == 0
            else acceptance.length(length, least_rate, known, least_chance)
            for acceptance, known, length in able
        ]

    def _most_of(self, sequence: Sequence) -> int:
        """With drafts, a step yields at most one token more than these."""
        if sequence.acceptance is None or not sequence.state.prompt_done:
            return 0
        return max(0, min(self._most, sequence.max_len - sequence.known - 1))

    def _useful(self, sequence: Sequence, ids: Seq[int]) -> Seq[int]:
        """The ids before the first that is none of the vocabulary, ends the choice, or does not
        match its grammar: no sample after it could be used."""
        if not ids:
            return ()
        stops, matcher = sequence.state.stops, sequence.matcher
        matcher = matcher and matcher.copy()
        for number, id in enumerate(ids):
            if not 0 <= id < self._vocab_size or id in stops:
                return ids[:number]
            if matcher is not None and (not matcher.accept((id,)) or matcher.stopped):
                return ids[:number]
        return ids
