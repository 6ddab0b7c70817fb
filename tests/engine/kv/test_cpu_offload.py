"""The host tier of the KV cache: loads, evictions, counters and cache reports.

These tests run on the sim, whose ids depend on every byte of KV: a wrong byte changes the ids.
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
from tests.support.engines.landing import BLOCK, content, host_bytes, sim, watched_sim

PROMPT = 16  # tokens in 4 blocks; 4 generated tokens need one more block


def engine_with_host_tier(slots: int, **changes: Any) -> EngineCore:
    """An engine with a pool of 5 blocks, enough for one request, and a host tier of `slots`
    blocks."""
    return sim(**{"num_blocks": 5, "host_kv_memory": host_bytes(slots)} | changes)


def request_for(name: str, **params: Any) -> Request:
    """A request whose prompt depends on the first letter of its name. Prompts of different letters
    share nothing."""
    first = 40 * (ord(name[0]) - ord("a"))
    return make_request(name, range(first, first + PROMPT), **params)


def run(engine: EngineCore, name: str, **params: Any) -> Run:
    return run_all(engine, [request_for(name, **params)])


def reserve(engine: EngineCore, name: str) -> Reservation:
    reservation = engine.reserve(request_for(name))
    assert reservation is not None
    engine.check_integrity()
    return reservation


def test_an_evicted_prompt_is_loaded_from_the_host_except_for_its_last_block() -> None:
    engine = engine_with_host_tier(16)
    first = run(engine, "a")
    run(engine, "b")
    again = run(engine, "a-2")
    assert again.ids("a-2") == first.ids("a")
    assert (again.use("a-2"), again.from_host("a-2")) == ((0, 0, 4), 12)
    assert again.steps[0].num_tokens == BLOCK


def test_without_a_host_tier_an_evicted_prompt_is_computed_again() -> None:
    engine = engine_with_host_tier(0)
    run(engine, "a")
    run(engine, "b")
    again = run(engine, "a-2")
    assert (again.use("a-2"), again.from_host("a-2")) == ((0, 0, 16), 0)
    load = engine.load()
    assert (load.host_blocks, load.host_total_blocks, load.host_stored_blocks_total) == (0, 0, 0)


def test_blocks_still_in_the_paged_cache_are_not_loaded_from_the_host() -> None:
    engine = engine_with_host_tier(16, num_blocks=7)
    run(engine, "a")
    run(engine, "b")  # takes the free blocks and evicts the last 2 blocks of a's prompt
    again = run(engine, "a-2")
    cached, _, computed = again.use("a-2")
    assert (cached, again.from_host("a-2"), computed) == (8, 4, 4)


def test_reserve_loads_host_blocks_before_it_returns() -> None:
    engine = engine_with_host_tier(16)
    before = reserve(engine, "a")
    engine.submit(request_for("a"), reservation=before)
    drive(engine)
    known = reserve(engine, "a")
    expected = content(engine, known.blocks[:4])
    engine.release(known)
    run(engine, "b")
    back = reserve(engine, "a-2")
    assert (back.cached, back.loaded) == (4, 4)
    assert content(engine, back.blocks[:4]) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_are_held_for_a_transfer_only_after_the_copies_of_launched_steps(
    overlap: bool,
) -> None:
    engine, runner = watched_sim(num_blocks=5, host_kv_memory=host_bytes(16), overlap=overlap)
    run(engine, "a")
    run(engine, "b")
    engine.submit(request_for("a-2"), report_filled=True)
    engine.step()
    assert not runner.host.settled
    [*chunks] = engine.full_chunks(request_for("a-2").id)
    engine.hold(chunks[0].blocks)
    assert runner.host.settled
    engine.unhold(chunks[0].blocks)
    drive(engine)


def test_a_reserved_request_counts_its_tokens_from_the_host_separately() -> None:
    engine = engine_with_host_tier(16)
    whole = run(engine, "a").ids("a")
    run(engine, "b")
    engine.submit(request_for("a-2"), reservation=reserve(engine, "a-2"))
    again = drive(engine)
    assert again.ids("a-2") == whole
    # All 4 blocks are loaded. The last is computed again, because a step needs at least one token.
    assert (again.use("a-2"), again.from_host("a-2")) == ((0, 0, 4), 12)
    assert engine.load().host_prompt_tokens_total == 12


def test_a_request_with_prompt_logprobs_loads_nothing_from_the_host() -> None:
    engine = engine_with_host_tier(16)
    run(engine, "a")
    run(engine, "b")
    loaded = engine.load().host_loaded_blocks_total
    again = run(engine, "a-2", prompt_logprobs=0)
    assert (again.use("a-2"), again.from_host("a-2")) == ((0, 0, 16), 0)
    assert engine.load().host_loaded_blocks_total == loaded


def test_a_preempted_request_loads_its_evicted_blocks_from_the_host() -> None:
    requests = [request_for(name, max_tokens=20) for name in ("a", "b", "c")]
    without = run_all(engine_with_host_tier(0, num_blocks=10), requests)
    engine = engine_with_host_tier(40, num_blocks=10)
    with_tier = run_all(engine, requests)
    load = engine.load()
    assert load.preemptions_total > 0
    assert load.host_loaded_blocks_total > 0
    assert with_tier.all_ids() == without.all_ids()
    computed = [sum(step.num_tokens for step in run.steps) for run in (with_tier, without)]
    assert computed[1] - computed[0] >= load.host_loaded_blocks_total * BLOCK // 2


def test_the_host_tier_is_bounded_and_evicts_the_least_recently_used_blocks() -> None:
    engine = engine_with_host_tier(8)
    for name in ("a", "b", "c", "d"):
        run(engine, name)
        load = engine.load()
        assert load.host_blocks <= load.host_total_blocks == 8
    assert load.host_evicted_blocks_total == load.host_stored_blocks_total - load.host_blocks
    assert load.host_blocks == 8
    assert load.host_bytes == host_bytes(8)
    assert run(engine, "a-2").from_host("a-2") == 0
    assert run(engine, "d-2").from_host("d-2") == 12


def test_blocks_that_were_loaded_back_are_not_copied_to_the_host_again() -> None:
    engine = engine_with_host_tier(16)
    run(engine, "a")
    run(engine, "b")
    run(engine, "a-2")
    stored = engine.load().host_stored_blocks_total
    run(engine, "b-2")
    run(engine, "a-3")
    assert engine.load().host_stored_blocks_total == stored


def test_a_prompt_whose_host_blocks_are_evicted_by_its_own_allocation_is_computed() -> None:
    for slots in (1, 2, 3):
        engine = engine_with_host_tier(slots)
        first = run(engine, "a")
        run(engine, "b")
        again = run(engine, "a-2")
        assert again.ids("a-2") == first.ids("a")
        engine.check_integrity()


def test_cached_blocks_counts_both_tiers() -> None:
    engine = engine_with_host_tier(16)
    run(engine, "a")
    hashes = engine.block_hashes(request_for("a"))
    assert engine.cached_blocks(hashes) == 4
    run(engine, "b")
    assert engine.cached_blocks(hashes) == 4
    without_tier = engine_with_host_tier(0)
    run(without_tier, "a")
    run(without_tier, "b")
    assert without_tier.cached_blocks(hashes) < 4


def test_a_chunk_is_reported_as_evicted_only_when_both_tiers_have_evicted_it() -> None:
    engine = engine_with_host_tier(5)
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


def test_host_memory_smaller_than_one_block_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--host-kv-memory 127 holds no block of 128 bytes"):
        sim(host_kv_memory=host_bytes(1) - 1)
    assert sim(host_kv_memory=host_bytes(3) + 100).load().host_total_blocks == 3


def test_more_host_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"no host memory for .* lower --host-kv-memory"):
        sim(host_kv_memory=1 << 60, overcommit=True)


def test_negative_host_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match="--host-kv-memory is -1"):
        build_sim(SimSettings(host_kv_memory=-1))
