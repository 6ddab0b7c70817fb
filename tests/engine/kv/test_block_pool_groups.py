"""The prefix cache with groups of layers: the longest usable prefix, and its blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.kv.block_pool import BlockPool, hash_in
from baton_engine.kv.host_blocks import CopiedBlocks
from baton_engine.kv.host_tier import HostTier
from baton_engine.sim.memory import SimMemory
from baton_protocol.ids import BlockHash
from baton_protocol.layout import KVGroup, KVLayout
from tests.support.engines.demands import kv_layout

BLOCK, SPANS, SIZE = 4, 6, 80
HASHES = [BlockHash(bytes([span + 1]) * 16) for span in range(SPANS)]
FULL, SHORT, LONG = KVGroup((0,)), KVGroup((1,), 5), KVGroup((2,), 9)
KEYS = st.sets(st.tuples(st.integers(0, SPANS - 1), st.integers(0, 2)))
Keys = set[tuple[int, int]]


def layout_of(*groups: KVGroup) -> KVLayout:
    return kv_layout(block=BLOCK, chunk=2, groups=groups)


def cache(pool: BlockPool, keys: Keys) -> None:
    """Put the blocks of these (span, group) into the pool's cache."""
    for span, group in sorted(keys):
        (block,) = pool.allocate(1)
        pool.register(block, hash_in(group, HASHES[span]), ends_chunk=span % 2 == 1 and not group)
        pool.release([block])


def usable(layout: KVLayout, present: Keys) -> tuple[int, Keys]:
    """The number of spans in the longest usable prefix, and the (span, group) that it needs."""
    for count in reversed(range(SPANS + 1)):
        seen = layout.window_start(count * BLOCK) // BLOCK
        needed = {
            (span, group)
            for group in range(layout.num_groups)
            for span in range(0 if group < layout.num_full_groups else seen, count)
        }
        if needed <= present:
            return count, needed
    raise AssertionError("the empty prefix is usable")


@given(
    groups=st.sampled_from([(FULL,), (SHORT,), (FULL, SHORT), (FULL, SHORT, LONG), (FULL, FULL)]),
    in_pool=KEYS,
    in_host=KEYS,
    all_present=st.integers(0, SPANS),
    slots=st.sampled_from([1, 4, 40]),
)
def test_take_finds_the_longest_prefix_whose_needed_blocks_a_tier_has(
    groups: tuple[KVGroup, ...], in_pool: Keys, in_host: Keys, all_present: int, slots: int
) -> None:
    layout = layout_of(*groups)
    pool = BlockPool(SIZE, HostTier(CopiedBlocks(SimMemory(layout, SIZE), slots)), layout)
    every = {(span, group) for span in range(SPANS) for group in range(len(groups))}
    in_pool |= {key for key in every if key[0] < all_present}
    cache(pool, in_host & every)
    pool.release(pool.allocate(SIZE))  # everything moves to the host tier
    cache(pool, in_pool & every)
    kept = set(pool.host.hashes())
    in_host = {key for key in every if hash_in(key[1], HASHES[key[0]]) in kept}

    expected, needed = usable(layout, (in_pool | in_host) & every)
    assert pool.cached(HASHES) == expected
    taken = pool.take(SPANS + 1, HASHES)
    assert taken is not None
    assert taken.cached + taken.loaded == expected
    from_host = sorted(key for key in needed if key not in in_pool)
    assert taken.cached == (from_host[0][0] if from_host else expected)
    assert len(taken.blocks) == (SPANS + 1) * len(groups)
    for index, block in enumerate(taken.blocks):
        key = divmod(index, len(groups))
        if key in needed:
            assert pool.hash_of(block) == hash_in(key[1], HASHES[key[0]])
        elif key[0] < expected:
            assert block == 0
        else:
            assert pool.hash_of(block) is None
    held = [block for block in taken.blocks if block]
    pool.check_integrity(Counter(held))
    pool.release(held)
    pool.check_integrity({})


def test_take_counts_the_blocks_of_all_groups_as_demand() -> None:
    pool = BlockPool(7, layout=layout_of(FULL, SHORT))
    assert pool.take(4, []) is None
    assert pool.take(3, [], spare=2) is None
    taken = pool.take(3, [], spare=1)
    assert taken is not None
    assert taken.blocks == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_chunk_is_reported_for_the_block_of_the_first_group(missing: int) -> None:
    pool = BlockPool(SIZE, layout=layout_of(FULL, SHORT))
    cache(pool, {(0, 0), (1, 0), (0, 1), (1, 1)} - {(1, missing)})
    assert pool.take_changes().stored == ((HASHES[1],) if missing else ())
