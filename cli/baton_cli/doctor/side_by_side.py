"""Runs checks side by side, and does not wait for one that hangs.

In: functions that yield results. Out: what each has yielded until its deadline, and whether it
ended. The threads are daemons: one that hangs in a name lookup does not keep the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """`run` yields results; it may take `deadline_s` seconds."""

    name: str
    run: Callable[[], Iterable[T]]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """`failure` is the exception that ended the work, None if it ended well or not in time."""

    results: tuple[T, ...]
    ended: bool
    failure: Exception | None = None


@dataclass(slots=True, eq=False)
class _Running(Generic[T]):
    work: Work[T]
    results: list[T] = field(default_factory=list)
    failure: Exception | None = None

    def run(self) -> None:
        try:
            for result in self.work.run():
                self.results.append(result)
        except Exception as error:
            logger.debug("%s failed", self.work.name, exc_info=True)
            self.failure = error


def run_side_by_side(works: Sequence[Work[T]]) -> list[Outcome[T]]:
    """The outcomes, in the order of `works`."""
    running = [_Running(work) for work in works]
    threads = [
        threading.Thread(target=one.run, name=f"check {one.work.name}", daemon=True)
        for one in running
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    outcomes = []
    for one, thread in zip(running, threads, strict=True):
        thread.join(max(0.0, began + one.work.deadline_s - time.monotonic()))
        ended = not thread.is_alive()
        outcomes.append(Outcome(tuple(one.results), ended, one.failure))
    return outcomes
