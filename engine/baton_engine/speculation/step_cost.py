"""StepCost: what one more token of a decode step costs, measured.

In: the tokens and seconds of decode steps. Out: the probability from which on a draft saves time.

Seconds are fitted as a + b * tokens by least squares, with less weight on earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterable

DECAY = 0.98
# Seconds of one more token by those of a step of one token, before steps of different sizes were
# measured.
ASSUMED_SHARE = 0.1
LEAST_VARIANCE = 0.1


class StepCost:
    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        # ASSUMED_SHARE, or what was measured when steps last had different sizes.
        self._share = ASSUMED_SHARE

    def note(self, tokens: int, seconds: float) -> None:
        """A step that computed one or more tokens of each decoding sequence took `seconds`."""
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + tokens
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + tokens * tokens
        self._xy = DECAY * self._xy + tokens * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance >= LEAST_VARIANCE:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            slope = min(max(slope, 0.0), mean_y / mean_x)
            self._share = slope / max(mean_y - slope * (mean_x - 1), 1e-9)

    def least_rate(self, sequences: int, chances: Iterable[float] = ()) -> float:
        """How probable a draft must be, so that a step of `sequences` sequences yields more tokens
        per second with it than without: the seconds of one more token, as a share of the step's
        seconds per token. `chances` are the probabilities of the drafts that there may be. The step
        has those that are worth their time, and the more tokens it yields, the more probable a
        further one must be."""
        slope, seconds = self._slope_and_step(sequences)
        tokens = float(sequences)
        for chance in sorted(chances, reverse=True):
            if chance * seconds <= slope * tokens:
                break
            tokens, seconds = tokens + chance, seconds + slope
        return min(1.0, slope * tokens / seconds)

    def seconds_won(self, sequences: int, drafted: int, accepted: int) -> float:
        """The seconds that `accepted` tokens take in steps of `sequences` tokens, less those of
        `drafted` tokens more in a step. 0.0 before a step was measured."""
        if not self._weight:
            return 0.0
        slope, step = self._slope_and_step(sequences)
        return accepted * step / sequences - drafted * slope

    def _slope_and_step(self, tokens: int) -> tuple[float, float]:
        """The seconds of one more token, and those of a step of `tokens` tokens."""
        if not self._weight:
            return ASSUMED_SHARE, 1 + ASSUMED_SHARE * (tokens - 1)
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        slope = self._share * mean_y / (1 + self._share * (mean_x - 1))
        return slope, max(mean_y + slope * (tokens - mean_x), 1e-9)
