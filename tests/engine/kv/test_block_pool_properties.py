"""The block pool against a naive model that uses lists and dictionaries."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton_engine.kv.block_pool import BlockPool
from baton_protocol.ids import BlockHash, BlockId
from tests.support.engines.cache_reports import follow


class PoolMachine(RuleBasedStateMachine):
    """Owners allocate, share, register and release at random."""

    @initialize(size=st.integers(1, 9))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.size = size
        self.owners: list[list[BlockId]] = []
        self.refs: dict[BlockId, int] = {}
        self.free = [BlockId(id) for id in range(1, size + 1)]
        self.hashes: dict[BlockId, BlockHash] = {}
        self.reported: set[BlockHash] = set()

    def hold(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            if block in self.free:
                self.free.remove(block)
            self.refs[block] = self.refs.get(block, 0) + 1
        self.owners.append(blocks)

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        fits = self.pool.fits(count)
        assert fits == (count <= len(self.free))
        if fits:
            expected = self.free[:count]
            taken = self.pool.allocate(count)
            assert taken == expected
            for block in taken:
                self.hashes.pop(block, None)
            self.hold(taken)

    @rule(data=st.data())
    @precondition(lambda self: any(self.owners))
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        self.pool.release(owner)
        for block in reversed(owner):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """A cache hit, or a hold for a transfer: distinct blocks, held or free."""
        blocks = data.draw(
            st.lists(st.integers(1, self.size).map(BlockId), unique=True, max_size=4)
        )
        self.pool.touch(blocks)
        self.hold(blocks)

    @rule(data=st.data(), names=st.lists(st.integers(0, 5), min_size=4, max_size=4))
    @precondition(lambda self: any(self.owners))
    def register(self, data: st.DataObject, names: list[int]) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        for block, name in zip(owner, names, strict=False):
            if block not in self.hashes:
                # Even names end a chunk, because a hash must always or never end a chunk.
                hash = BlockHash(bytes([name]) * 16)
                self.pool.register(block, hash, ends_chunk=name % 2 == 0)
                self.hashes[block] = hash

    @rule()
    def report(self) -> None:
        self.reported = follow(self.pool, self.reported)

    @invariant()
    def the_pool_equals_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.refs)
        assert self.pool.free_order() == self.free
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached_free == sum(1 for each in self.free if each in self.hashes)
        present = set(self.hashes.values())
        assert set(self.pool.cached_chunks()) == {each for each in present if each[0] % 2 == 0}
        for hash in present:
            (block,) = self.pool.lookup([hash])
            assert self.hashes[block] == hash
        assert self.pool.lookup([BlockHash(b"absent" * 2)]) == []


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)
