"""Bit sets of chunks represent the same chunks as sets of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton_node.engine.chunk_sets import chunks_of, first_chunks, runs_of

Chunks = st.sets(st.integers(0, 200))


@given(Chunks, st.integers(0, 10))
def test_chunks_of_a_bit_set_are_in_ascending_order(chunks: set[int], most: int) -> None:
    bits = sum(1 << chunk for chunk in chunks)
    assert chunks_of(bits) == tuple(sorted(chunks))
    assert chunks_of(bits, most) == tuple(sorted(chunks))[:most]


@given(Chunks)
def test_runs_contain_each_chunk_once_and_are_not_adjacent(chunks: set[int]) -> None:
    runs = runs_of(sum(1 << chunk for chunk in chunks))
    assert [n for first, count in runs for n in range(first, first + count)] == sorted(chunks)
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))


def test_the_first_chunks_start_at_0() -> None:
    assert [chunks_of(first_chunks(count)) for count in range(3)] == [(), (0,), (0, 1)]
