"""Sets of a prompt's chunks, as ints.

Bit i of a set stands for chunk i. Such a set is immutable, and one of 8,192 chunks takes 1 KiB.
"""

from __future__ import annotations


def first_chunks(count: int) -> int:
    """Return the set of chunks 0 to count - 1."""
    return (1 << count) - 1


def chunks_of(bits: int, most: int | None = None) -> tuple[int, ...]:
    """Return the chunks in the set, ascending; at most the first `most`."""
    chunks: list[int] = []
    while bits and (most is None or len(chunks) < most):
        chunks.append(_lowest(bits))
        bits &= bits - 1
    return tuple(chunks)


def runs_of(bits: int) -> tuple[tuple[int, int], ...]:
    """Return (first, count) of each run of neighbouring chunks, ascending."""
    runs: list[tuple[int, int]] = []
    while bits:
        first = _lowest(bits)
        count = _lowest(~(bits >> first))
        runs.append((first, count))
        bits &= ~(first_chunks(count) << first)
    return tuple(runs)


def _lowest(bits: int) -> int:
    """Return the index of the lowest bit that is set. `bits` must not be 0."""
    return (bits & -bits).bit_length() - 1
