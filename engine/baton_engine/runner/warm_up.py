"""What is done once before the first request: weights read, steps of every size recorded.

In: a runner that says which batch sizes it wants warmed. Out: all of them warmed, and a line that
says how far it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton_engine.progress import ProgressLine

GIB = 1 << 30

logger = logging.getLogger(__name__)


class Warmable(Protocol):
    """`buckets` are the sizes of decode steps that it prepares; none on a CPU."""

    @property
    def buckets(self) -> Sequence[int]: ...

    def warm(self, bucket: int) -> None:
        """Prepare steps of so many rows; no KV of anybody changes."""


def warm_all(runner: Warmable, line: ProgressLine) -> None:
    """The largest first: the others then live in the memory that it took."""
    buckets = sorted(runner.buckets, reverse=True)
    for number, bucket in enumerate(buckets):
        line.show(_capturing(number, buckets))
        runner.warm(bucket)
    if buckets:
        logger.info("captured %s in %.1f s", describe(buckets), line.seconds)


def describe(buckets: Sequence[int]) -> str:
    """43 batch sizes (256 ... 1)."""
    if len(buckets) == 1:
        return f"1 batch size ({buckets[0]})"
    return f"{len(buckets)} batch sizes ({max(buckets)} ... {min(buckets)})"


def counting(line: ProgressLine, total: int) -> Callable[[int], None]:
    """What a loader tells of each tensor's bytes; `total` are all of them."""
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        line.show(f"loading weights, {done / GIB:.1f} of {total / GIB:.1f} GiB")

    return add


def _capturing(number: int, buckets: Sequence[int]) -> str:
    return f"capturing {number + 1} of {describe(buckets)}"
