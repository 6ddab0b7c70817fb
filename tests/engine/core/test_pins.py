"""Pinned prefixes: blocks that are not evicted, their bound, and requests that need their room."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import PinRefused
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.pins import Pins
from baton_protocol.ids import BlockHash
from baton_protocol.layout import KVGroup
from tests.support.engines.engine_core import make_request, run_all, scripted
from tests.support.engines.landing import BLOCK, GROUPS, host_bytes, sim

HASHES = [BlockHash(bytes([span + 1]) * 16) for span in range(8)]
PREFIX = tuple(range(8, 32))  # 6 blocks of 4 tokens


def cached_pool(blocks: int, spans: int) -> BlockPool:
    """A pool whose cache holds the first spans of HASHES."""
    pool = BlockPool(blocks)
    held = pool.allocate(spans)
    for block, hash in zip(held, HASHES, strict=False):
        pool.register(block, hash, ends_chunk=False)
    pool.release(held)
    return pool


def evict_all(pool: BlockPool) -> None:
    pool.release(pool.allocate(pool.num_free))


def engine_of(blocks: int = 24, share: float = 0.5, **changes: Any) -> EngineCore:
    scheduling = SchedulingOptions(max_pinned_fraction=share)
    groups = max(1, len(changes.get("groups", ())))
    return sim(num_blocks=blocks * groups, scheduling=scheduling, **changes)


def pin(engine: EngineCore, name: str, prompt: tuple[int, ...] = PREFIX) -> None:
    """Compute a prompt, and pin its full blocks."""
    request = make_request(f"of-{name}", prompt, max_tokens=1)
    run_all(engine, [request])
    engine.pins.pin(name, engine.block_hashes(request))
    engine.check_integrity()


def test_pinned_blocks_are_held_and_found_whatever_is_allocated() -> None:
    pool = cached_pool(8, 4)
    pins = Pins(pool, 1, 0.5)
    pins.pin("a", HASHES[:4])
    evict_all(pool)
    assert (pool.cached(HASHES), pool.num_free, len(pins.blocks)) == (4, 4, 4)
    pool.check_integrity(dict.fromkeys(pins.references(), 1))
    assert pins.unpin("a")
    assert not pins.unpin("a")
    assert (pool.num_free, pool.cached(HASHES)) == (8, 4)
    evict_all(pool)
    assert pool.cached(HASHES) == 0
    pool.check_integrity({})


@pytest.mark.parametrize(
    ("share", "held", "asked", "refusal"),
    [
        (0.5, 0, 4, ""),
        (
            0.5,
            0,
            5,
            "needs 5 blocks; 4 of 8 blocks may be pinned (--max-pinned-fraction 0.5), and 0",
        ),
        (
            0.5,
            3,
            5,
            "needs 2 blocks; 4 of 8 blocks may be pinned (--max-pinned-fraction 0.5), and 3",
        ),
        (1.0, 3, 5, ""),
        (0.0, 0, 1, "needs 1 blocks; 0 of 8 blocks may be pinned"),
        (1.0, 0, 6, "does not hold the prefix"),
        (1.0, 0, 0, "shorter than a block"),
    ],
)
def test_a_pin_that_does_not_fit_is_refused_with_the_figures_and_changes_nothing(
    share: float, held: int, asked: int, refusal: str
) -> None:
    pool = cached_pool(8, 5)
    pins = Pins(pool, 1, share)
    if held:
        pins.pin("first", HASHES[:held])
    before = (list(pins.names), sorted(pins.references()), pool.free_order())
    if refusal:
        with pytest.raises(PinRefused) as raised:
            pins.pin("second", HASHES[:asked])
        assert refusal in str(raised.value)
        assert (list(pins.names), sorted(pins.references()), pool.free_order()) == before
    else:
        pins.pin("second", HASHES[:asked])
        assert len(pins.blocks) == max(held, asked)  # blocks in common count once


def test_without_a_prefix_cache_nothing_is_pinned() -> None:
    pins = Pins(BlockPool(8, caching=False), 1, 0.5)
    with pytest.raises(PinRefused, match="--no-enable-prefix-caching"):
        pins.check("a", HASHES[:1])


def test_a_pin_of_the_same_name_replaces_the_earlier_one() -> None:
    pool = cached_pool(8, 4)
    pins = Pins(pool, 1, 0.5)
    for spans in (4, 2, 3):
        pins.pin("a", HASHES[:spans])
        assert sorted(pins.references()) == sorted(pool.lookup(HASHES[:spans]))
        pool.check_integrity(dict.fromkeys(pins.references(), 1))


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_pinned_prefix_survives_a_flood_of_other_prompts(
    groups: tuple[KVGroup, ...], overlap: bool, host: int
) -> None:
    engine = engine_of(groups=groups, overlap=overlap, host_kv_memory=host_bytes(host))
    plain = run_all(engine_of(groups=groups), [make_request("hit", (*PREFIX, 1, 2, 3))])
    pin(engine, "a")
    flood = [make_request(f"flood-{number}", 30, max_tokens=9) for number in range(20)]
    run_all(engine, flood)
    load = engine.load()
    assert load.pinned_blocks == len(engine.pins.blocks) == load.total_blocks - load.free_blocks
    run = run_all(engine, [make_request("hit", (*PREFIX, 1, 2, 3))])
    assert run.use("hit") == (len(PREFIX), 0, 3)
    assert run.all_ids() == plain.all_ids()
    engine.pins.unpin("a")
    run_all(engine, [make_request(f"again-{number}", 30, max_tokens=9) for number in range(20)])
    if not host:
        assert engine.cached_blocks(engine.prefix_hashes(PREFIX)) == 0
    assert engine.load().free_blocks == engine.load().total_blocks


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_needs_the_pinned_blocks_gets_them_oldest_pin_first(overlap: bool) -> None:
    """8 of 24 blocks are pinned. A request of 40 tokens needs 10, one of 96 tokens all."""
    engine = engine_of(max_model_len=96, overlap=overlap)
    first, second = tuple(range(50, 66)), tuple(range(70, 86))
    pin(engine, "old", first)
    pin(engine, "new", second)
    run_all(engine, [make_request(name, 39, max_tokens=2) for name in ("a", "b", "c")])
    assert list(engine.pins.names) == ["old", "new"]
    run_all(engine, [make_request("grows", 5, max_tokens=74)])  # 79 tokens with KV: 20 blocks
    assert list(engine.pins.names) == ["new"]
    run = run_all(engine, [make_request("whole", 94, max_tokens=2)])
    assert (list(engine.pins.names), len(run.ids("whole"))) == ([], 2)


def test_a_request_shares_the_pinned_blocks_of_its_own_prefix() -> None:
    engine = engine_of(max_model_len=96)
    pin(engine, "a")
    whole = make_request("whole", (*PREFIX, *range(100, 170)), max_tokens=2)  # all 24 blocks
    reservation = engine.reserve(whole)
    assert reservation is not None
    assert reservation.cached == len(PREFIX) // BLOCK
    engine.release(reservation)
    assert list(engine.pins.names) == ["a"]
    assert engine.reserve(make_request("other", 94, max_tokens=2)) is not None
    assert list(engine.pins.names) == []


def test_a_reset_of_the_cache_unpins_all() -> None:
    engine = engine_of()
    pin(engine, "a")
    engine.reset_prefix_cache()
    engine.check_integrity()
    load = engine.load()
    assert (list(engine.pins.names), load.pinned_blocks, load.free_blocks) == ([], 0, 24)


def test_tenants_pin_their_own_blocks() -> None:
    engine, _ = scripted()
    request = make_request("a", 8, salt="acme", max_tokens=1)
    run_all(engine, [request])
    with pytest.raises(PinRefused):
        engine.pins.pin("a", engine.prefix_hashes(request.prompt_ids))
    engine.pins.pin("a", engine.prefix_hashes(request.prompt_ids, "acme"))
