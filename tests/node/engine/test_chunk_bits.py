"""Sets of chunks as bits say the same as sets of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton_node.engine.job import chunks_of, first_chunks, runs_of

Chunks = st.sets(st.integers(0, 200))


@given(Chunks, st.integers(0, 10))
def test_the_chunks_of_a_set_ascend(chunks: set[int], most: int) -> None:
    bits = sum(1 << chunk for chunk in chunks)
    assert chunks_of(bits) == tuple(sorted(chunks))
    assert chunks_of(bits, most) == tuple(sorted(chunks))[:most]


@given(Chunks)
def test_runs_hold_each_chunk_once_and_do_not_touch(chunks: set[int]) -> None:
    runs = runs_of(sum(1 << chunk for chunk in chunks))
    assert [n for first, count in runs for n in range(first, first + count)] == sorted(chunks)
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))


def test_the_first_chunks_begin_at_zero() -> None:
    assert [chunks_of(first_chunks(count)) for count in range(3)] == [(), (0,), (0, 1)]
