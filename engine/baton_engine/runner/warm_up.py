"""Warm-up before the first request: record the decode steps of every batch size, and compile the
kernels of all other steps. A kernel that is compiled while serving stops all requests for a second.

In: a runner with the batch sizes to record. Out: a runner with all sizes recorded. A progress line
shows how far it is, here and while weights load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton_engine.progress import ProgressLine

GIB = 1 << 30

logger = logging.getLogger(__name__)


class Warmable(Protocol):
    """A runner that can be warmed up. `buckets` are the sizes of decode steps to prepare, in lines;
    empty on a CPU."""

    @property
    def buckets(self) -> Sequence[int]: ...

    def warm(self, bucket: int) -> None:
        """Prepare steps of `bucket` lines. Changes no KV of any request."""

    def warm_eager(self) -> None:
        """Prepare all other steps, if there is something to compile."""


def warm_all(runner: Warmable, line: ProgressLine) -> None:
    """Warm up all sizes, the largest first: smaller ones then reuse its memory."""
    buckets = sorted(runner.buckets, reverse=True)
    for number, bucket in enumerate(buckets):
        line.show(_capturing(number, buckets))
        runner.warm(bucket)
    line.show("compiling kernels")
    runner.warm_eager()
    if buckets:
        logger.info("captured %s in %.1f s", describe(buckets), line.seconds)


def describe(buckets: Sequence[int]) -> str:
    """A text such as "43 batch sizes (256 ... 1)"."""
    if len(buckets) == 1:
        return f"1 batch size ({buckets[0]})"
    return f"{len(buckets)} batch sizes ({max(buckets)} ... {min(buckets)})"


def counting(line: ProgressLine, total: int) -> Callable[[int], None]:
    """A callback for the weight loader: call it with each tensor's size in bytes, and it shows the
    progress towards `total` bytes."""
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        line.show(f"loading weights, {done / GIB:.1f} of {total / GIB:.1f} GiB")

    return add


def _capturing(number: int, buckets: Sequence[int]) -> str:
    return f"capturing {number + 1} of {describe(buckets)}"
