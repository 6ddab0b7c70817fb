"""The benchmark of a step's host work: full batches, reused blocks, and the time of each part."""

from __future__ import annotations

from itertools import count

import pytest

from baton_engine.kv.block_pool import BlockPool
from benchmarks.engine.host_overhead import (
    BOOKS,
    LIVE,
    books_ms,
    host_ms,
    make_engine,
    spent_s,
    timed,
)

STEPS = 20  # more than a block has tokens, so each request starts a new block


@pytest.mark.parametrize("kind", ["core alone", "torch runner", "padded runner"])
def test_all_requests_generate_in_each_step(kind: str) -> None:
    engine = make_engine(kind, 0.6, STEPS)
    result = engine.step()
    assert (result.num_seqs, result.num_prompt_tokens, len(result.tokens)) == (LIVE, 0, LIVE)
    seconds = count(0.0, 0.5)
    assert host_ms(engine, 2, 2, lambda: next(seconds)) == [250.0, 250.0]


def test_every_free_block_is_cached_so_each_allocation_evicts_one() -> None:
    engine = make_engine("core alone", 0.0, STEPS)
    load = engine.load()
    assert load.free_blocks == load.cached_blocks > LIVE


def test_the_timing_counts_each_block_that_becomes_full() -> None:
    engine = make_engine("core alone", 0.0, STEPS)
    before = BlockPool.register
    with timed() as calls:
        for _ in range(16):
            engine.step()
    assert len(calls["register"]) == LIVE
    assert calls.keys() == {name for _, name in BOOKS}
    assert BlockPool.register is before
    assert len(books_ms(engine, 1, 2)) == 2


def test_the_time_of_each_part_is_its_median_call_without_the_timing_itself() -> None:
    assert spent_s([[1.0, 9.0, 2.0], [], [4.0]], idle=0.5) == 3 * 1.5 + 3.5
