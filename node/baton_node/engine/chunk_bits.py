"""Sets of a prompt's chunks as bit sets: bit i of an int stands for chunk i.

Such a set is immutable, and one of 8,192 chunks takes 1 KiB.
"""

from __future__ import annotations


def first_chunks(count: int) -> int:
    """The set of the chunks 0 to count - 1."""
    return (1 << count) - 1


def chunks_of(bits: int, most: int | None = None) -> tuple[int, ...]:
    """The chunks of the set, ascending; the first `most` of them."""
    chunks: list[int] = []
    while bits and (most is None or len(chunks) < most):
        chunks.append(_lowest(bits))
        bits &= bits - 1
    return tuple(chunks)


def runs_of(bits: int) -> tuple[tuple[int, int], ...]:
    """(first, count) of each run of neighbouring chunks, ascending."""
    runs: list[tuple[int, int]] = []
    while bits:
        first = _lowest(bits)
        count = _lowest(~(bits >> first))
        runs.append((first, count))
        bits &= ~(first_chunks(count) << first)
    return tuple(runs)


def _lowest(bits: int) -> int:
    """Index of the lowest bit that is set; `bits` is not 0."""
    return (bits & -bits).bit_length() - 1
