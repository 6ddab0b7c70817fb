"""Warm-up before the first request: record the decode steps of every batch size, and compile the
kernels of all other steps. A kernel that is compiled while serving stops all requests for a second.

In: the batch sizes to record, and what records them. Out: all sizes recorded. A progress line
shows how far it is, here and while weights load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton_engine.progress import ProgressLine

GIB = 1 << 30
logger = logging.getLogger(__name__)


def warm_all(
    buckets: Sequence[int],
    warm: Callable[[int], None],
    warm_others: Callable[[], None],
    line: ProgressLine,
) -> None:
    """Prepare the decode steps of all sizes with `warm`, the largest first: smaller ones then reuse
    its memory. `buckets` are their sizes in lines; there are none on a CPU. `warm_others` prepares
    all other steps. Neither changes the KV of a request."""
    ordered = sorted(buckets, reverse=True)
    for number, bucket in enumerate(ordered):
        line.show(_capturing(number, ordered))
        warm(bucket)
    line.show("compiling kernels")
    warm_others()
    if ordered:
        logger.info("captured %s in %.1f s", describe(ordered), line.seconds)


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
