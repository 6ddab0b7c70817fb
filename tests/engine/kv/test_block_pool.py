"""The block pool: LRU order, reference counts, the prefix cache and its change log."""

from __future__ import annotations

import pytest

from baton_engine.kv.block_pool import BlockPool, IntegrityError
from baton_protocol.ids import BlockHash, BlockId


def hash_of(text: str) -> BlockHash:
    return BlockHash(text.encode().ljust(16))


H0, H1, H2 = hash_of("h0"), hash_of("h1"), hash_of("h2")


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def register(pool: BlockPool, blocks: list[BlockId], *hashes: BlockHash) -> None:
    """Register the leading blocks under `hashes`, with chunks of 2 blocks."""
    for index, (block, hash) in enumerate(zip(blocks, hashes, strict=False)):
        pool.register(block, hash, ends_chunk=index % 2 == 1)


def test_a_new_pool_allocates_blocks_in_id_order_and_never_block_0() -> None:
    pool = BlockPool(3)
    assert pool.num_free == 3
    assert pool.allocate(3) == [1, 2, 3]
    assert not pool.fits(1)
    pool.check_integrity(dict.fromkeys(ids(1, 2, 3), 1))


def test_allocating_more_blocks_than_are_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        pool.allocate(3)
    assert pool.free_order() == [1, 2]


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="pool of 0 blocks"):
        BlockPool(0)


def test_the_tail_of_a_freed_request_is_reused_before_its_head() -> None:
    pool = BlockPool(6)
    pool.release(pool.allocate(4))
    assert pool.free_order() == [5, 6, 4, 3, 2, 1]


def test_a_shared_block_becomes_free_when_its_last_holder_releases_it() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.touch(blocks[:1])
    pool.release(blocks)
    assert (pool.refs(BlockId(1)), pool.refs(BlockId(2))) == (1, 0)
    pool.release(blocks[:1])
    assert pool.num_free == 4


def test_releasing_a_free_block_raises() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 1 is given back and nobody holds it"):
        pool.release(ids(1))


@pytest.mark.parametrize("block", [0, -1, 3])
def test_the_padding_block_and_unknown_blocks_cannot_be_touched(block: int) -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match=rf"block {block} is not in 1\.\.2"):
        pool.touch(ids(block))


def test_a_free_block_stays_cached_until_it_is_reused() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    register(pool, blocks, H0, H1)
    pool.release(blocks)
    assert pool.lookup([H0, H1]) == [1, 2]
    assert pool.num_cached_free == 2
    pool.allocate(2)  # blocks 3 and 2; block 2 is the tail of the freed request
    assert pool.lookup([H0, H1]) == [1]
    assert pool.hash_of(BlockId(2)) is None
    assert pool.num_cached_free == 1
    pool.check_integrity({BlockId(2): 1, BlockId(3): 1})


def test_a_lookup_stops_at_the_first_miss() -> None:
    pool = BlockPool(3)
    register(pool, pool.allocate(1), H0)
    assert pool.lookup([H1, H0]) == []
    assert pool.lookup([H0, H1]) == [1]


def test_a_hit_in_the_free_queue_leaves_one_block_less_to_allocate() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    register(pool, blocks, H0, H1)
    pool.release(blocks[:2])
    hits = pool.lookup([H0, H1])
    assert pool.fits(0, hits)
    assert not pool.fits(1, hits)
    pool.touch(hits)
    assert pool.num_free == pool.num_cached_free == 0


def test_duplicate_content_stays_cached_until_its_last_block_is_reused() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    for block in (first, second, third):
        pool.register(block, H0, ends_chunk=True)
    assert pool.lookup([H0]) == [first]
    pool.release([first])
    pool.allocate(1)
    assert pool.lookup([H0]) == [second]
    pool.release([third])
    pool.allocate(1)
    assert pool.lookup([H0]) == [second]
    assert pool.take_changes().evicted == ()
    pool.check_integrity(dict.fromkeys(ids(1, 2, 3), 1))
    pool.release([second])
    pool.allocate(1)
    assert pool.lookup([H0]) == []
    pool.check_integrity(dict.fromkeys(ids(1, 2, 3), 1))


def test_registering_a_block_again_under_the_same_hash_changes_nothing() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, H0, ends_chunk=True)
    pool.register(block, H0, ends_chunk=True)
    pool.check_integrity({block: 1})
    with pytest.raises(AssertionError, match="another hash"):
        pool.register(block, H1, ends_chunk=True)


def test_registering_a_free_block_raises() -> None:
    with pytest.raises(AssertionError, match="nobody holds it"):
        BlockPool(1).register(BlockId(1), H0, ends_chunk=False)


def test_only_chunk_ends_enter_the_change_log() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    register(pool, blocks, H0, H1, H2)
    changes = pool.take_changes()
    assert (changes.stored, changes.evicted) == ((H1,), ())
    assert pool.cached_chunks() == (H1,)
    pool.release(blocks)
    pool.allocate(4)
    changes = pool.take_changes()
    assert (changes.stored, changes.evicted) == ((), (H1,))
    assert pool.cached_chunks() == ()
    assert pool.take_changes() == type(changes)()


def test_a_chunk_stored_and_evicted_between_two_reports_is_not_reported() -> None:
    pool = BlockPool(1)
    for _ in range(2):
        (block,) = pool.allocate(1)
        pool.register(block, H0, ends_chunk=True)
        pool.release([block])
    assert pool.take_changes().stored == (H0,)
    (block,) = pool.allocate(1)
    pool.register(block, H0, ends_chunk=True)
    assert pool.take_changes() == type(pool.take_changes())()


def test_a_scripted_sequence_of_requests_gives_the_expected_free_order() -> None:
    """Blocks of 4 tokens. Request A has tokens 1..13. B shares 8 of A's tokens, C 12 and D none."""
    pool = BlockPool(7)
    a = pool.allocate(3)
    register(pool, a, H0, H1)
    pool.register(a[2], H2, ends_chunk=False)
    a += pool.allocate(1)
    assert pool.free_order() == [5, 6, 7]
    pool.release(a)
    assert pool.free_order() == [5, 6, 7, 4, 3, 2, 1]
    b = pool.lookup([H0, H1])
    pool.touch(b)
    b += pool.allocate(1)
    assert b == [1, 2, 5]
    assert pool.free_order() == [6, 7, 4, 3]
    c = pool.lookup([H0, H1])  # H2 is cached too, but at least one token must be computed
    pool.touch(c)
    c += pool.allocate(1)
    pool.register(c[2], H2, ends_chunk=False)
    assert c == [1, 2, 6]
    assert pool.free_order() == [7, 4, 3]
    d = pool.allocate(3)
    assert d == [7, 4, 3]
    assert pool.lookup([H0, H1, H2]) == [1, 2, 6]
    assert not pool.fits(1)
    pool.release(b)
    assert pool.free_order() == [5]
    pool.release(c)
    assert pool.free_order() == [5, 6, 2, 1]
    pool.release(d)
    assert pool.free_order() == [5, 6, 2, 1, 3, 4, 7]
    pool.check_integrity({})


def test_check_integrity_reports_wrong_reference_counts() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    with pytest.raises(IntegrityError, match="block 1 has 1 references, 0 are accounted for"):
        pool.check_integrity({})
    with pytest.raises(IntegrityError, match="block 2 has 0 references, 1"):
        pool.check_integrity({blocks[0]: 1, BlockId(2): 1})


def corrupt_count(pool: BlockPool) -> None:
    pool._free._size += 1


def corrupt_padding(pool: BlockPool) -> None:
    pool._blocks[0].refs = 1


def corrupt_cached_count(pool: BlockPool) -> None:
    pool._cached_free += 1


def corrupt_hash(pool: BlockPool) -> None:
    pool._blocks[1].hash = H2


def corrupt_entry(pool: BlockPool) -> None:
    del pool._cached[H0]


def corrupt_chunks(pool: BlockPool) -> None:
    pool._chunks[H2] = None


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_count, "queued"),
        (corrupt_padding, "padding"),
        (corrupt_cached_count, "free blocks are cached"),
        (corrupt_hash, "does not carry"),
        (corrupt_entry, "are in the cache"),
        (corrupt_chunks, "chunks listed"),
    ],
)
def test_check_integrity_describes_each_kind_of_corruption(corrupt: object, message: str) -> None:
    pool = BlockPool(3)
    register(pool, pool.allocate(2), H0, H1)
    assert callable(corrupt)
    corrupt(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity({BlockId(1): 1, BlockId(2): 1})


def test_check_integrity_reports_a_held_block_in_the_free_queue() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._free.popleft()  # the free queue now holds block 1 in place of block 2
    pool._free.append(pool._blocks[1])
    with pytest.raises(IntegrityError, match="held block is in the free queue"):
        pool.check_integrity({BlockId(1): 1})
