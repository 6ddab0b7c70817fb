"""Blocks that the paged cache evicts, kept in host memory: what comes back, what goes, what is
told.

On the sim, whose tokens depend on every byte of KV: had a block come back wrong, the ids would be
others.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import SettingsError
from baton_engine.interface import Reservation
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.request import Request
from tests.support.engines.engine_core import Run, drive, make_request, run_all
from tests.support.engines.landing import BLOCK, content, host_bytes, sim

PROMPT = 16  # tokens, 4 blocks; an answer of 4 tokens has one block more


def tiered(slots: int, **changes: Any) -> EngineCore:
    """A pool of 5 blocks, which holds one request, and a host tier."""
    return sim(**{"num_blocks": 5, "host_kv_memory": host_bytes(slots)} | changes)


def asked(name: str, **params: Any) -> Request:
    """The name's first letter decides the prompt; those of two letters share nothing."""
    first = 40 * (ord(name[0]) - ord("a"))
    return make_request(name, range(first, first + PROMPT), **params)


def run(engine: EngineCore, name: str, **params: Any) -> Run:
    return run_all(engine, [asked(name, **params)])


def reserve(engine: EngineCore, name: str) -> Reservation:
    found = engine.reserve(asked(name))
    assert found is not None
    engine.check_integrity()
    return found


def test_a_prompt_that_was_evicted_comes_back_and_one_block_is_computed() -> None:
    engine = tiered(16)
    first = run(engine, "a")
    run(engine, "b")
    again = run(engine, "a-2")
    assert again.ids("a-2") == first.ids("a")
    assert (again.use("a-2"), again.from_host("a-2")) == ((0, 0, 4), 12)
    assert again.steps[0].num_tokens == BLOCK


def test_without_a_host_tier_what_was_evicted_is_computed_again() -> None:
    engine = tiered(0)
    run(engine, "a")
    run(engine, "b")
    again = run(engine, "a-2")
    assert (again.use("a-2"), again.from_host("a-2")) == ((0, 0, 16), 0)
    load = engine.load()
    assert (load.host_blocks, load.host_total_blocks, load.host_stored_blocks_total) == (0, 0, 0)


def test_what_is_left_in_the_paged_cache_is_not_taken_from_the_host() -> None:
    engine = tiered(16, num_blocks=7)
    run(engine, "a")
    run(engine, "b")  # takes what is free, and the last 2 blocks of the first
    again = run(engine, "a-2")
    cached, _, computed = again.use("a-2")
    assert (cached, again.from_host("a-2"), computed) == (8, 4, 4)


def test_a_reservation_brings_blocks_back_before_it_returns() -> None:
    engine = tiered(16)
    before = reserve(engine, "a")
    engine.submit(asked("a"), reservation=before)
    drive(engine)
    known = reserve(engine, "a")
    bytes_there = content(engine, known.blocks[:4])
    engine.release(known)
    run(engine, "b")
    back = reserve(engine, "a-2")
    assert (back.cached, back.loaded) == (4, 4)
    assert content(engine, back.blocks[:4]) == bytes_there


def test_of_a_reservation_the_host_s_share_of_the_prompt_is_counted_apart() -> None:
    engine = tiered(16)
    whole = run(engine, "a").ids("a")
    run(engine, "b")
    engine.submit(asked("a-2"), reservation=reserve(engine, "a-2"))
    again = drive(engine)
    assert again.ids("a-2") == whole
    # All 4 blocks are there; the last is computed anew, since one token has to be.
    assert (again.use("a-2"), again.from_host("a-2")) == ((0, 0, 4), 12)
    assert engine.load().host_prompt_tokens_total == 12


def test_a_request_that_asks_how_likely_its_prompt_is_takes_nothing_from_the_host() -> None:
    engine = tiered(16)
    run(engine, "a")
    run(engine, "b")
    loaded = engine.load().host_loaded_blocks_total
    again = run(engine, "a-2", prompt_logprobs=0)
    assert (again.use("a-2"), again.from_host("a-2")) == ((0, 0, 16), 0)
    assert engine.load().host_loaded_blocks_total == loaded


def test_a_preempted_request_finds_in_the_host_what_others_have_taken() -> None:
    requests = [asked(name, max_tokens=20) for name in ("a", "b", "c")]
    without = run_all(tiered(0, num_blocks=10), requests)
    engine = tiered(40, num_blocks=10)
    with_tier = run_all(engine, requests)
    load = engine.load()
    assert load.preemptions_total > 0
    assert load.host_loaded_blocks_total > 0
    assert with_tier.all_ids() == without.all_ids()
    computed = [sum(step.num_tokens for step in run.steps) for run in (with_tier, without)]
    assert computed[1] - computed[0] >= load.host_loaded_blocks_total * BLOCK // 2


def test_the_tier_is_bounded_and_loses_what_was_used_longest_ago() -> None:
    engine = tiered(8)
    for name in ("a", "b", "c", "d"):
        run(engine, name)
        load = engine.load()
        assert load.host_blocks <= load.host_total_blocks == 8
    assert load.host_evicted_blocks_total == load.host_stored_blocks_total - load.host_blocks
    assert load.host_blocks == 8
    assert load.host_bytes == host_bytes(8)
    assert run(engine, "a-2").from_host("a-2") == 0
    assert run(engine, "d-2").from_host("d-2") == 12


def test_what_came_back_is_not_copied_out_again() -> None:
    engine = tiered(16)
    run(engine, "a")
    run(engine, "b")
    run(engine, "a-2")
    stored = engine.load().host_stored_blocks_total
    run(engine, "b-2")
    run(engine, "a-3")
    assert engine.load().host_stored_blocks_total == stored


def test_a_tier_that_loses_what_is_wanted_to_what_makes_room_for_it_computes_that() -> None:
    for slots in (1, 2, 3):
        engine = tiered(slots)
        first = run(engine, "a")
        run(engine, "b")
        again = run(engine, "a-2")
        assert again.ids("a-2") == first.ids("a")
        engine.check_integrity()


def test_blocks_of_both_tiers_are_cached_blocks() -> None:
    engine = tiered(16)
    run(engine, "a")
    hashes = engine.block_hashes(asked("a"))
    assert engine.cached_blocks(hashes) == 4
    run(engine, "b")
    assert engine.cached_blocks(hashes) == 4
    bare = tiered(0)
    run(bare, "a")
    run(bare, "b")
    assert bare.cached_blocks(hashes) < 4


def test_a_chunk_counts_as_evicted_only_when_both_tiers_have_lost_it() -> None:
    engine = tiered(5)
    run(engine, "a")
    chunks = engine.cached_chunks()
    assert engine.cache_changes().stored == chunks
    run(engine, "b")
    assert not engine.cache_changes().evicted
    assert set(chunks) < set(engine.cached_chunks())
    run(engine, "c")
    run(engine, "d")
    assert set(engine.cache_changes().evicted) >= set(chunks)
    assert not set(chunks) & set(engine.cached_chunks())


def test_too_little_host_memory_for_one_block_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--host-kv-memory 127 holds no block of 128 bytes"):
        sim(host_kv_memory=host_bytes(1) - 1)
    assert sim(host_kv_memory=host_bytes(3) + 100).load().host_total_blocks == 3


def test_host_memory_that_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"no host memory for .* lower --host-kv-memory"):
        sim(host_kv_memory=1 << 60, overcommit=True)


def test_less_than_no_host_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match="--host-kv-memory is -1"):
        build_sim(SimSettings(host_kv_memory=-1))
