"""Where the time of a call goes, by part: every part its own, what it called not counted with it.

In: functions with the part that each is. Out: the same functions, noting; milliseconds per part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

Clock = Callable[[], float]
# A part's name, or what gives it from the first argument: methods of one class may be two parts.
Name = str | Callable[[Any], str]


class PartTimer:
    """Of one thread. Seconds of all calls since the last `take`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._inner = 0.0  # seconds of the calls that the one under way has made

    def noting(self, name: Name, function: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **named: Any) -> Any:
            part = name if isinstance(name, str) else name(args[0])
            before, self._inner = self._inner, 0.0
            began = self._clock()
            try:
                return function(*args, **named)
            finally:
                took = self._clock() - began
                self._spent[part] = self._spent.get(part, 0.0) + took - self._inner
                self._inner = before + took

        return outer

    def take(self) -> dict[str, float]:
        spent, self._spent = self._spent, {}
        return spent


@contextmanager
def noted(timer: PartTimer, functions: list[tuple[Any, str, Name]]) -> Iterator[None]:
    """Let each (owner, its attribute, part) note its time meanwhile."""
    with ExitStack() as patches:
        for owner, attribute, name in functions:
            wrapped = timer.noting(name, getattr(owner, attribute))
            patches.enter_context(patch.object(owner, attribute, wrapped))
        yield
