"""Both tiers of the prefix cache against a naive model, bytes included.

The model is lists and dictionaries: which blocks are free in what order, what each block and the
host tier hold. Decisions are made as in a step: any number of them, then all copies in one go, then
the blocks that are new get their content.
"""

from __future__ import annotations

import numpy as np
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
from baton_engine.kv.cpu_offload import CopiedBlocks, HostTier
from baton_engine.sim.runner import SimMemory
from baton_protocol.ids import BlockHash, BlockId
from tests.support.engines.cache_reports import follow
from tests.support.engines.demands import kv_layout

LAYOUT = kv_layout(heads=2, block=2, chunk=2, shards=2)
NAMES = 12
CHAINS = st.tuples(st.sampled_from([0, 4, 8]), st.integers(1, 4))  # first name, how many
BLOCKS = 7


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


class TierMachine(RuleBasedStateMachine):
    """Owners take, share, fill and release at random. Names of even number end a chunk."""

    @initialize(size=st.integers(3, BLOCKS), slots=st.integers(1, 6))
    def start(self, size: int, slots: int) -> None:
        self.memory = SimMemory(LAYOUT, size)
        self.pool = BlockPool(size, HostTier(CopiedBlocks(self.memory, slots)))
        self.size, self.slots = size, slots
        self.owners: list[tuple[list[BlockId], list[BlockHash]]] = []  # and what is to be there
        self.refs: dict[BlockId, int] = {}
        self.free = [BlockId(id) for id in range(1, size + 1)]
        self.hashes: dict[BlockId, BlockHash] = {}
        self.host: list[BlockHash] = []  # used longest ago first
        self.reported: set[BlockHash] = set()
        self.moved = True

    # --- the model ------------------------------------------------------------------------------

    def hold(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            if block in self.free:
                self.free.remove(block)
            self.refs[block] = self.refs.get(block, 0) + 1

    def evict(self, count: int) -> list[BlockId]:
        """What the next `count` blocks of the free queue held goes to the host."""
        taken = self.free[:count]
        for block in taken:
            hash = self.hashes.pop(block, None)
            if hash is not None and hash not in self.hashes.values():
                if hash in self.host:
                    self.host.remove(hash)
                elif len(self.host) == self.slots:
                    self.host.pop(0)
                self.host.append(hash)
        self.hold(taken)
        return taken

    def leading(self, wanted: list[BlockHash]) -> list[BlockHash]:
        missing = [index for index, hash in enumerate(wanted) if hash not in self.host]
        return wanted[: missing[0]] if missing else wanted

    # --- decisions ------------------------------------------------------------------------------

    @rule(chain=CHAINS, more=st.integers(0, 2))
    def take(self, chain: tuple[int, int], more: int) -> None:
        first, count = chain
        wanted = [name(number) for number in range(first, first + count)]
        hits = self.pool.lookup(wanted)
        new = len(wanted) - len(hits) + more
        room = len([each for each in self.free if each not in hits])
        while new > room and self.owners:
            assert self.pool.take(len(wanted) + more, wanted) is None
            self.let_go(len(self.owners) - 1)  # the youngest is preempted
            room = len([each for each in self.free if each not in hits])
        found = self.pool.take(len(wanted) + more, wanted)
        assert (found is None) == (new > room)
        if found is None:
            return
        self.moved = False
        self.hold(hits)
        beyond = wanted[len(hits) :]
        for hash in reversed(self.leading(beyond)):
            self.host.remove(hash)
            self.host.append(hash)
        fresh = self.evict(new)
        brought = self.leading(beyond)
        assert found.blocks == hits + fresh
        assert (found.cached, found.loaded) == (len(hits), len(brought))
        self.hashes.update(zip(fresh, brought, strict=False))
        self.owners.append((found.blocks, wanted))

    @rule()
    @precondition(lambda self: any(self.owners))
    def grow(self) -> None:
        if self.pool.fits(1):
            self.moved = False
            expected = self.evict(1)
            assert self.pool.allocate(1) == expected
            self.owners[-1][0].extend(expected)

    @rule(data=st.data())
    @precondition(lambda self: any(self.owners))
    def release(self, data: st.DataObject) -> None:
        self.let_go(data.draw(st.integers(0, len(self.owners) - 1)))

    def let_go(self, owner: int) -> None:
        blocks, _ = self.owners.pop(owner)
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)

    # --- the step -------------------------------------------------------------------------------

    @rule(budget=st.integers(1, BLOCKS))
    def step(self, budget: int) -> None:
        """All copies, then every block that holds nothing yet is overwritten, and some filled."""
        self.pool.host.move()
        self.moved = True
        for block in range(1, self.size + 1):
            if BlockId(block) not in self.hashes:
                self.write(BlockId(block), 0xEE)
        due = [
            (block, hash)
            for blocks, wanted in self.owners
            for block, hash in zip(blocks, wanted, strict=False)
            if block not in self.hashes
        ]
        for block, hash in due[:budget]:
            self.write(block, hash[0])
            self.pool.register(block, hash, ends_chunk=hash[0] % 2 == 0)
            self.hashes[block] = hash

    def write(self, block: BlockId, byte: int) -> None:
        for shard in range(LAYOUT.kv_shards):
            data = bytes([byte]) * (LAYOUT.block_bytes // LAYOUT.kv_shards)
            self.memory.write([block], memoryview(data), shard)

    @rule(chain=CHAINS)
    def serve(self, chain: tuple[int, int]) -> None:
        """A request from its start to its end."""
        self.take(chain, more=1)
        self.step(BLOCKS)
        if self.owners:
            self.let_go(len(self.owners) - 1)

    @rule()
    def report(self) -> None:
        self.reported = follow(self.pool, self.reported)

    # --- what holds always ------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.refs)
        assert self.pool.free_order() == self.free
        assert self.pool.host.hashes() == self.host
        assert len(self.pool.host) <= self.slots
        present = {*self.hashes.values(), *self.host}
        assert set(self.pool.cached_chunks()) == {each for each in present if each[0] % 2 == 0}
        for hash in {name(number) for number in range(NAMES)}:
            assert self.pool.cached([hash]) == (hash in present)

    @invariant()
    def each_named_block_holds_what_its_name_says(self) -> None:
        if not hasattr(self, "pool") or not self.moved:
            return
        share = LAYOUT.block_bytes // LAYOUT.kv_shards
        for block, hash in self.hashes.items():
            for shard in range(LAYOUT.kv_shards):
                found = np.zeros(share, np.uint8)
                self.memory.read([block], found.data, shard)
                assert set(found.tolist()) == {hash[0]}


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=80, stateful_step_count=40)
