"""Both tiers of the prefix cache against a naive model, bytes included.

The model is lists and dictionaries: the free blocks in order, and the content of each block and of
the host tier. It works like a step: any number of allocations, then all copies at once, then writes
to the new blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton_engine.interface import KVMemory
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.host_blocks import CopiedBlocks, HostMemory
from baton_engine.kv.host_tier import HostTier
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.kv.pinned_blocks import PinnedBlocks
from baton_engine.sim.memory import SimMemory
from baton_protocol.ids import BlockHash, BlockId
from tests.support.engines.cache_reports import follow
from tests.support.engines.demands import kv_layout
from tests.support.engines.fake_cuda import FakeCuda

LAYOUT = kv_layout(heads=2, block=2, chunk=2, shards=2)
NAMES = 12
CHAINS = st.tuples(st.sampled_from([0, 4, 8]), st.integers(1, 4))  # (first name, number of names)
BLOCKS = 7


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


class TierMachine(RuleBasedStateMachine):
    """Owners take, share, fill and release blocks at random. Hashes with an even name end a
    chunk."""

    @initialize(size=st.integers(3, BLOCKS), slots=st.integers(1, 6))
    def start(self, size: int, slots: int) -> None:
        self.memory, host = self.make_memory(size, slots)
        self.pool = BlockPool(size, HostTier(host))
        self.size, self.slots = size, slots
        # Each owner's blocks, and the hashes of the content that they are to hold.
        self.owners: list[tuple[list[BlockId], list[BlockHash]]] = []
        self.refs: dict[BlockId, int] = {}
        self.free = [BlockId(id) for id in range(1, size + 1)]
        self.hashes: dict[BlockId, BlockHash] = {}
        self.host: list[BlockHash] = []  # least recently used first
        self.reported: set[BlockHash] = set()
        self.copied = True

    def make_memory(self, size: int, slots: int) -> tuple[KVMemory, HostMemory]:
        memory = SimMemory(LAYOUT, size)
        return memory, CopiedBlocks(memory, slots)

    def start_step(self) -> None:
        """The copies queued so far are done now."""

    # --- the model ------------------------------------------------------------------------------

    def hold(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            if block in self.free:
                self.free.remove(block)
            self.refs[block] = self.refs.get(block, 0) + 1

    def evict(self, count: int, claimed: Sequence[BlockHash] = ()) -> list[BlockId]:
        """Take the next `count` blocks of the free queue. Their content moves to the host tier, as
        far as there is a slot without claimed content."""
        taken = self.free[:count]
        for block in taken:
            hash = self.hashes.pop(block, None)
            if hash is not None and hash not in self.hashes.values():
                if hash in self.host:
                    self.host.remove(hash)
                elif len(self.host) == self.slots:
                    if self.host[0] in claimed:
                        continue
                    self.host.pop(0)
                self.host.append(hash)
        self.hold(taken)
        return taken

    def present(self) -> set[BlockHash]:
        return {*self.hashes.values(), *self.host}

    # --- allocations ----------------------------------------------------------------------------

    @rule(chain=CHAINS, more=st.integers(0, 2))
    def take(self, chain: tuple[int, int], more: int) -> None:
        first, count = chain
        wanted = [name(number) for number in range(first, first + count)]
        found = list(takewhile(self.present().__contains__, wanted))
        loaded = [hash for hash in found if hash not in self.hashes.values()]
        hits = [block for hash in found for block in self.pool.lookup([hash])]
        new = len(wanted) - len(hits) + more
        room = len([each for each in self.free if each not in hits])
        while new > room and self.owners:
            assert self.pool.take(len(wanted) + more, wanted) is None
            self.drop_owner(len(self.owners) - 1)  # the youngest is preempted
            room = len([each for each in self.free if each not in hits])
        taken = self.pool.take(len(wanted) + more, wanted)
        assert (taken is None) == (new > room)
        if taken is None:
            return
        self.copied = False
        self.hold(hits)
        for hash in reversed(loaded):
            self.host.remove(hash)
            self.host.append(hash)
        fresh = self.evict(new, loaded)
        self.hashes.update(zip(fresh, loaded, strict=False))
        split = found.index(loaded[0]) if loaded else len(found)
        assert (taken.cached, taken.loaded) == (split, len(found) - split)
        assert [self.hashes[block] for block in taken.blocks[: len(found)]] == found
        assert taken.blocks[len(found) :] == fresh[len(loaded) :]
        self.owners.append((taken.blocks, wanted))

    @rule()
    @precondition(lambda self: any(self.owners))
    def grow(self) -> None:
        if self.pool.fits(1):
            self.copied = False
            expected = self.evict(1)
            assert self.pool.allocate(1) == expected
            self.owners[-1][0].extend(expected)

    @rule(data=st.data())
    @precondition(lambda self: any(self.owners))
    def release(self, data: st.DataObject) -> None:
        self.drop_owner(data.draw(st.integers(0, len(self.owners) - 1)))

    def drop_owner(self, owner: int) -> None:
        blocks, _ = self.owners.pop(owner)
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)

    # --- the step -------------------------------------------------------------------------------

    @rule(budget=st.integers(1, BLOCKS))
    def step(self, budget: int) -> None:
        """Make all copies, overwrite every block without content, then fill up to `budget`
        blocks."""
        self.pool.host.move()
        self.start_step()
        self.copied = True
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
        """Run one request from start to end."""
        self.take(chain, more=1)
        self.step(BLOCKS)
        if self.owners:
            self.drop_owner(len(self.owners) - 1)

    @rule()
    def report(self) -> None:
        self.reported = follow(self.pool, self.reported)

    # --- invariants -----------------------------------------------------------------------------

    @invariant()
    def the_pool_equals_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.refs)
        assert self.pool.free_order() == self.free
        assert self.pool.host.hashes() == self.host
        assert len(self.pool.host) <= self.slots
        present = self.present()
        assert set(self.pool.cached_chunks()) == {each for each in present if each[0] % 2 == 0}
        for hash in {name(number) for number in range(NAMES)}:
            assert self.pool.cached([hash]) == (hash in present)

    @invariant()
    def each_cached_block_holds_the_content_of_its_hash(self) -> None:
        if not hasattr(self, "pool") or not self.copied:
            return
        share = LAYOUT.block_bytes // LAYOUT.kv_shards
        for block, hash in self.hashes.items():
            for shard in range(LAYOUT.kv_shards):
                content = np.zeros(share, np.uint8)
                self.memory.read([block], content.data, shard)
                assert set(content.tolist()) == {hash[0]}


class LateTierMachine(TierMachine):
    """The same over the host memory of a GPU, with copies as late as their events allow."""

    def make_memory(self, size: int, slots: int) -> tuple[KVMemory, HostMemory]:
        self.cuda = FakeCuda()
        memory = TorchMemory(LAYOUT, size, torch.device("cpu"))
        return memory, PinnedBlocks(memory, slots, self.cuda.calls)

    def start_step(self) -> None:
        self.cuda.start_step()


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=80, stateful_step_count=40)
TestLateTier = LateTierMachine.TestCase
TestLateTier.settings = settings(max_examples=40, stateful_step_count=40)
