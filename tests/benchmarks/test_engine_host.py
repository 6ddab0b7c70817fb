"""The benchmark of a step's host work measures what it says: full batches, used blocks, books."""

from __future__ import annotations

import pytest

from baton_engine.blocks import BlockPool
from benchmarks.engine_host import BOOKS, LIVE, books_ms, host_ms, make_engine, timed

STEPS = 20  # over a block: each request begins one


@pytest.mark.parametrize("kind", ["core alone", "torch runner", "padded runner"])
def test_all_requests_generate_in_each_step(kind: str) -> None:
    engine = make_engine(kind, 0.6, STEPS)
    result = engine.step()
    assert (result.num_seqs, result.num_prompt_tokens, len(result.tokens)) == (LIVE, 0, LIVE)
    assert host_ms(engine, 2, 2) > [0.0, 0.0]


def test_each_block_that_is_taken_held_something_else() -> None:
    engine = make_engine("core alone", 0.0, STEPS)
    load = engine.load()
    assert load.free_blocks == load.cached_blocks > LIVE


def test_the_books_note_each_block_that_becomes_full() -> None:
    engine = make_engine("core alone", 0.0, STEPS)
    before = BlockPool.register
    with timed() as calls:
        for _ in range(16):
            engine.step()
    assert len(calls["register"]) == LIVE
    assert calls.keys() == {name for _, name in BOOKS}
    assert BlockPool.register is before
    assert books_ms(engine, 1, 1)[0] > 0.0
