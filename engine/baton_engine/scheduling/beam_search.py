"""Beam search: which continuations of a request's beams go on, and which answers are the best.

In: for each beam the likeliest next tokens. Out: the next beams, until the search is over; then the
finished answers, the best first. The rules are those of transformers' beam search:

- The search begins with one beam, the prompt. Of all continuations it looks at the best ones: so
  many that as many as `width` are left if each beam also ends with each id that may end it.
- Of these, the first `width` that do not end go on. Those that end and are among the first `width`
  are finished answers. An answer ends with a stop id, or when it has its maximum length.
- A finished answer's score is the sum of its log-probabilities divided by its length to the power
  of the length penalty. The best `width` answers are kept.
- The search is over if all continuations that it looked at end. With `width` finished answers it is
  also over if `early_stopping` is True, or if no beam seems able to become better than the worst of
  them. The best beam's score is then taken at its length so far; with "never" and a positive length
  penalty at the maximum length, where it is highest. One beam ends with its first answer, so it is
  the greedy one.

Pure: the same tokens give the same beams. So a search whose node is lost runs again from the
prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_protocol.sampling import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """The beam `parent`, continued by the token `position.sampled`. `score` is the sum of the
    log-probabilities. The first beam, the prompt, has neither parent nor position."""

    parent: Beam | None = None
    position: PositionLogprobs | None = None
    score: float = 0.0

    def positions(self) -> list[PositionLogprobs]:
        """All tokens after the prompt."""
        found, beam = [], self
        while beam.parent is not None and beam.position is not None:
            found.append(beam.position)
            beam = beam.parent
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. `stop_id` is the id that ends it; None at the maximum length."""

    beam: Beam
    score: float
    finish: FinishReason
    stop_id: int | None = None


class NextBeam(NamedTuple):
    """A beam that goes on: the index of the beam that it continues, and its new token."""

    parent: int
    id: int


class _Continuation(NamedTuple):
    score: float
    parent: int
    token: TokenLogprob


class BeamSearch:
    """The search of one request. `stops` are the ids that end an answer, of which those in
    `eos_ids` do at the maximum length, too. `answers` are the finished ones, the best first."""

    def __init__(
        self,
        params: SamplingParams,
        stops: Collection[int],
        *,
        eos_ids: Collection[int],
        max_length: int,
    ) -> None:
        self.width = params.n
        self.answers: list[Answer] = []
        self.looked_at = max(2, 1 + len(stops)) * params.n
        self._stops = stops
        self._eos_ids = () if params.ignore_eos else eos_ids
        self._max_length = max_length
        self._penalty = params.length_penalty
        self._early_stopping = params.early_stopping if params.n > 1 else True
        self._length = 0
        self._beams = [Beam()]

    def advance(self, likeliest: Sequence[Sequence[TokenLogprob]]) -> list[NextBeam]:
        """Continue each beam, in the order of the last call's result, by one of its likeliest
        tokens: at least `looked_at`, or all. Returns the next beams; none if the search is over."""
        self._length += 1
        continued = [
            _Continuation(beam.score + token.logprob, parent, token)
            for parent, (beam, tokens) in enumerate(zip(self._beams, likeliest, strict=True))
            for token in tokens[: self.looked_at]
        ]
        best = sorted(continued, key=lambda each: -each.score)[: self.looked_at]
        going_on = [each for each in best if not self._ends(each.token.id)]
        for each in best[: self.width]:
            if self._ends(each.token.id):
                self._finish(self._beam(each, likeliest), each.token.id)
        going_on = going_on[: self.width]
        if not going_on or self._is_over(going_on[0].score):
            return []
        self._beams = [self._beam(each, likeliest) for each in going_on]
        return [NextBeam(each.parent, each.token.id) for each in going_on]

    def _ends(self, id: int) -> bool:
        return self._length >= self._max_length or id in self._stops

    def _beam(self, each: _Continuation, likeliest: Sequence[Sequence[TokenLogprob]]) -> Beam:
        position = PositionLogprobs(each.token, tuple(likeliest[each.parent]))
        return Beam(self._beams[each.parent], position, each.score)

    def _finish(self, beam: Beam, id: int) -> None:
        stopped = id in self._eos_ids or (id in self._stops and self._length < self._max_length)
        score = beam.score / self._length**self._penalty
        answer = Answer(beam, score, "stop", id) if stopped else Answer(beam, score, "length")
        self.answers = sorted([*self.answers, answer], key=lambda each: -each.score)[: self.width]

    def _is_over(self, best: float) -> bool:
        """Whether the search ends although beams could go on, the best with this score."""
        if len(self.answers) < self.width:
            return False
        if self._early_stopping is True:
            return True
        at_most = self._early_stopping == "never" and self._penalty > 0
        length = self._max_length if at_most else self._length
        return not best / length**self._penalty > self.answers[-1].score


class LiveBeams:
    """A search, and which sequences are its beams: `choices` has the choice of each beam.
    `sampling` are the parameters of its samples: the greedy token, which is not used, and the
    likeliest ones."""

    def __init__(self, search: BeamSearch, params: SamplingParams) -> None:
        self.search = search
        self.choices = [0]
        self.sampling = msgspec.structs.replace(
            params, temperature=0.0, logprobs=max(self.search.looked_at, params.logprobs or 0)
        )
        self._likeliest: dict[int, Sequence[TokenLogprob]] = {}  # by choice

    def take(self, choice: int, likeliest: Sequence[TokenLogprob]) -> bool:
        """A beam has its likeliest next tokens. Returns True if now all beams have them."""
        self._likeliest[choice] = likeliest
        return len(self._likeliest) == len(self.choices)

    def advance(self) -> list[NextBeam]:
        """The next beams (see BeamSearch). Then the caller sets `choices`."""
        likeliest, self._likeliest = self._likeliest, {}
        return self.search.advance([likeliest[choice] for choice in self.choices])
