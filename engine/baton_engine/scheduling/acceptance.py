"""Acceptance: how often a sequence's drafts were right, and how many are worth their time.

In: the drafts of each step and how many were right. Out: the number of drafts for the next step.
"""

from __future__ import annotations

import math

# Before the first draft, the rate is this, with the weight of two drafts.
PRIOR_RATE = 0.6
PRIOR_WEIGHT = 2.0
# A step's drafts count this much less with each later step that has drafts.
DECAY = 0.85
# Tokens without drafts after drafts were not worth their time, doubled each time up to the most.
LEAST_PAUSE = 8
MOST_PAUSE = 256
# Steps in a row without a guess before a sequence pauses, if steps wait for those that may have
# drafts; the most tokens that it then pauses, which are also the most that it begins to copy late.
PATIENCE = 4
MOST_WAIT = 32


class Acceptance:
    """`drafted` and `accepted` count the sequence's drafts, and those that were the next tokens.
    `forced`: the drafts under way are the tokens that the sequence's grammar allows alone. They say
    nothing about how good guesses are."""

    __slots__ = (
        "_empty",
        "_pause",
        "_right",
        "_tried",
        "accepted",
        "drafted",
        "forced",
        "resumes_at",
    )

    def __init__(self) -> None:
        self.drafted = self.accepted = 0
        self.forced = False
        self.resumes_at = 0  # number of known tokens from which on drafts are made again
        self._right = self._tried = 0.0
        self._pause = LEAST_PAUSE
        self._empty = 0  # steps in a row without a guess

    @property
    def rate(self) -> float:
        """The estimated probability that a draft is right if the drafts before it are."""
        return (self._right + PRIOR_RATE * PRIOR_WEIGHT) / (self._tried + PRIOR_WEIGHT)

    def chances(self, most: int, known: int) -> list[float]:
        """The probability that each of the next `most` drafts of a sequence of `known` tokens, and
        all before it, are right. None if it makes no drafts."""
        if known < self.resumes_at:
            return []
        rate = self.rate
        return [rate**number for number in range(1, most + 1)]

    def note(self, drafted: int, accepted: int) -> None:
        """Of `drafted` drafts in a row, the first `accepted` were right."""
        self._empty = 0
        self.drafted += drafted
        self.accepted += accepted
        if self.forced:
            return
        self._right = DECAY * self._right + accepted
        self._tried = DECAY * self._tried + accepted + (accepted < drafted)
        if accepted:
            self._pause = LEAST_PAUSE

    def note_no_guess(self, known: int) -> None:
        """There was no guess for a sequence of `known` tokens. After some such steps, it makes no
        drafts for some tokens."""
        self._empty += 1
        if self._empty >= PATIENCE:
            self.resumes_at = known + min(LEAST_PAUSE << min(self._empty - PATIENCE, 8), MOST_WAIT)

    def pause(self, known: int) -> None:
        """There are no drafts for the next tokens of a sequence of `known` tokens."""
        self.resumes_at = max(self.resumes_at, known + LEAST_PAUSE)

    def length(self, most: int, least_rate: float, known: int, least_chance: float = 0.0) -> int:
        """The number of drafts, at most `most`, for a sequence of `known` tokens. If not even the
        first is right with the probability `least_rate`, there are no drafts for some tokens, and
        then one to try again. Else draft i is worth its time if the first i are all right with at
        least this probability, and with `least_chance`, which a draft needs beside those of other
        sequences."""
        if known < self.resumes_at:
            return 0
        rate = self.rate
        if rate < least_rate:
            if self.resumes_at and known - self.resumes_at < 2:
                return 1
            self.resumes_at = known + self._pause
            self._pause = min(2 * self._pause, MOST_PAUSE)
            return 0
        least = max(least_rate, least_chance)
        if rate >= 1 or least <= 0:
            return most
        if least >= 1:
            return 0
        return min(most, int(math.log(least) / math.log(rate)))
