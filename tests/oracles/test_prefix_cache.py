"""The prefix cache (O-PFX): which blocks are cached and reused, and which tokens are computed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.kv.block_pool import BlockPool, hash_in
from baton_engine.scheduling.sequence import blocks_for
from baton_protocol.hashing import extend_hashes, root_hash
from baton_protocol.ids import BlockHash, Fingerprint
from baton_protocol.layout import KVGroup
from tests.oracles.engines import engine_of, hashes_of, row_sizes, tables
from tests.support.engines.demands import kv_layout
from tests.support.engines.engine_core import drive, make_request, run_all

ROOT = root_hash(Fingerprint("f" * 32))
ABC, GHI = BlockHash(b"abc123".ljust(16)), BlockHash(b"ghi789".ljust(16))


def test_a_fully_cached_prompt_computes_its_last_token_O_PFX_1() -> None:
    engine, runner = engine_of(1)
    prompt = [11, 12, 13, 14, 15]
    run_all(engine, [make_request("first", prompt, max_tokens=1)])
    assert engine.cached_blocks(hashes_of(engine, prompt)) == 5
    run = run_all(engine, [make_request("again", prompt, max_tokens=1)])
    assert run.use("again") == (4, 0, 1)
    assert runner.work()[-1] == [(4, 1)]


def pool_with_two_cached() -> BlockPool:
    """A pool with hash abc123 in block 5 and def456 in block 8."""
    pool = BlockPool(9)
    blocks = pool.allocate(8)
    pool.register(blocks[4], ABC, ends_chunk=False)
    pool.register(blocks[7], BlockHash(b"def456".ljust(16)), ends_chunk=False)
    return pool


def test_a_lookup_returns_the_hits_before_the_first_miss_O_PFX_2_O_PFX_2b() -> None:
    assert pool_with_two_cached().lookup([ABC, GHI]) == [5]
    assert pool_with_two_cached().lookup([GHI, ABC]) == []


@pytest.mark.parametrize(("tokens", "blocks"), [(16, 0), (17, 1), (32, 1), (33, 2), (48, 2)])
def test_a_fully_cached_prompt_reuses_all_blocks_before_its_last_token_O_PFX_3(
    tokens: int, blocks: int
) -> None:
    engine, runner = engine_of()
    prompt = make_request("a", tokens).prompt_ids
    run_all(engine, [make_request("first", prompt, max_tokens=1)])
    run = run_all(engine, [make_request("again", prompt, max_tokens=1)])
    assert run.use("again") == (16 * blocks, 0, tokens - 16 * blocks)
    assert list(tables(runner)[0][:blocks]) == list(tables(runner, 0)[0][:blocks])


def test_a_fully_landed_prompt_computes_its_last_token_O_PFX_1() -> None:
    engine, runner = engine_of()
    request = make_request("a", 32, max_tokens=1)
    parked = engine.reserve(request)
    assert parked is not None
    engine.submit(request, reservation=parked, landed=[(0, 2)])
    assert drive(engine).use("a") == (0, 31, 1)
    assert runner.work() == [[(31, 1)]]


def test_concurrent_requests_with_one_prompt_cache_two_blocks_with_one_hash_O_PFX_4() -> None:
    engine, runner = engine_of()
    prompt = make_request("a", 17).prompt_ids
    run_all(engine, [make_request(name, prompt, max_tokens=1) for name in "AB"])
    assert row_sizes(runner) == [17, 17]
    a, b = (table[0] for table in tables(runner))
    assert a != b
    [name] = hashes_of(engine, prompt)
    assert engine._pool.hash_of(a) == engine._pool.hash_of(b) == name
    assert engine._pool.lookup([name]) == [a]


def test_a_lookup_finds_the_second_block_of_a_hash_after_the_first_is_reused_O_PFX_4() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    for block in (blocks[4], blocks[7]):
        pool.register(block, ABC, ends_chunk=False)
    assert pool.lookup([ABC]) == [5]
    pool.release([blocks[4]])
    pool.allocate(1)  # reuses block 5
    assert pool.lookup([ABC]) == [8]


def test_a_second_prompt_computes_only_the_tail_after_the_shared_prefix_O_PFX_5() -> None:
    engine, runner = engine_of()
    head = list(make_request("a", 64).prompt_ids)
    run_all(engine, [make_request("first", [*head, *range(20)], max_tokens=1)])
    run = run_all(engine, [make_request("second", [*head, *range(40, 70)], max_tokens=1)])
    assert run.use("second") == (64, 0, 30)
    assert runner.work()[-1] == [(64, 30)]


def test_100_tokens_of_which_64_are_cached_compute_36_in_3_new_blocks_O_PFX_6() -> None:
    engine, runner = engine_of()
    prompt = make_request("a", 100).prompt_ids
    run_all(engine, [make_request("head", prompt[:64], max_tokens=1)])
    run = run_all(engine, [make_request("whole", prompt, max_tokens=1)])
    assert run.use("whole") == (64, 0, 36)
    old, new = set(tables(runner, 0)[0]), tables(runner)[0]
    assert len(new) == 7
    assert [block in old for block in new] == [True] * 4 + [False] * 3


def test_a_changed_token_changes_the_hashes_of_its_block_and_all_later_ones_O_PFX_7() -> None:
    tokens = list(make_request("a", 96).prompt_ids)
    names = extend_hashes(ROOT, tokens, 16)
    for position, kept in [(0, 0), *((16 * block + 15, block) for block in range(6))]:
        changed = [*tokens[:position], 99, *tokens[position + 1 :]]
        equal = [a == b for a, b in zip(names, extend_hashes(ROOT, changed, 16), strict=True)]
        assert equal == [True] * kept + [False] * (6 - kept)
    assert all(a != b for a, b in pairwise(names))


def test_a_span_is_a_hit_only_if_it_is_cached_in_both_groups_O_PFX_8() -> None:
    groups = (KVGroup((0,)), KVGroup((1,)))
    pool = BlockPool(4, layout=kv_layout(layers=2, groups=groups))
    first, second = pool.allocate(2)
    pool.register(first, ABC, ends_chunk=False)
    assert pool.cached([ABC]) == 0
    pool.register(second, hash_in(1, ABC), ends_chunk=False)
    assert pool.cached([ABC]) == 1


@pytest.mark.parametrize(
    ("caching", "params"),
    [
        (False, {}),
        (True, {"skip_reading_prefix_cache": True}),
        (True, {"prompt_logprobs": 0}),
    ],
)
def test_the_cache_is_not_read_if_it_is_off_or_skipped_O_PFX_9(
    caching: bool, params: dict[str, Any]
) -> None:
    engine, runner = engine_of(scheduling=SchedulingOptions(enable_prefix_caching=caching))
    prompt = make_request("a", 40).prompt_ids
    run_all(engine, [make_request("first", prompt, max_tokens=1)])
    assert (engine.load().cached_blocks > 0) == caching
    request = make_request("again", prompt, max_tokens=1, **params)
    parked = engine.reserve(request)
    assert parked is not None
    assert parked.cached == 0
    engine.release(parked)
    run = run_all(engine, [request])
    assert run.use("again") == (0, 0, 40)
    assert runner.work()[-1] == [(0, 40)]


def test_257_tokens_fill_and_cache_one_block_of_256_O_PFX_10() -> None:
    engine, runner = engine_of(256)
    prompt = make_request("a", 257).prompt_ids
    run_all(engine, [make_request("a", prompt, max_tokens=1)])
    assert len(engine.block_hashes(make_request("a", prompt))) == 1
    assert len(tables(runner)[0]) == blocks_for(257, 256) == 2
    assert [engine._pool.hash_of(block) is not None for block in tables(runner)[0]] == [True, False]
