"""StepClock: the seconds of steps, without work that would be no measure of later ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepClock:
    """Counts as `clock` does, but not while it is stopped."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.left_out = 0.0  # seconds while it was stopped

    def __call__(self) -> float:
        return self._clock() - self.left_out

    @contextmanager
    def stopped(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self.left_out += self._clock() - began
