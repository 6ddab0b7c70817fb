"""The host tier: bounded host memory for blocks that the paged cache evicts.

In: the hash and the block of cached content whose block is about to be reused; hashes that a
request looks up after the paged cache missed. Out: copies between blocks and slots of host memory,
and the hashes that are evicted from both tiers.

Content stays in the tier after it is loaded back. It never changes, so its next eviction from the
pool copies nothing. When the tier is full, the least recently used hash is evicted.

Copies are queued when they are decided, and move() makes them in that order before anything else
reads or writes the blocks. The order matters: a copy out must read the block's old content, and a
copy in may read a slot that the next copy overwrites.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from baton_engine.kv.host_blocks import HostMemory
from baton_protocol.ids import BlockHash, BlockId


class KeptBlock(NamedTuple):
    slot: int
    ends_chunk: bool


class Copy(NamedTuple):
    out: bool  # True: from the block to the slot; False: from the slot to the block
    block: BlockId
    slot: int


class HostTier:
    """The slot of each kept hash, the queued copies, and counters since the start in blocks
    (`stored`, `loaded`, `evicted`). Without memory the tier keeps nothing."""

    def __init__(self, memory: HostMemory | None = None) -> None:
        self._memory = memory
        self.num_slots = memory.num_slots if memory is not None else 0
        self.slot_bytes = memory.slot_bytes if memory is not None else 0
        self._kept: OrderedDict[BlockHash, KeptBlock] = OrderedDict()  # least recently used first
        self._claimed: frozenset[BlockHash] = frozenset()
        self._due: list[Copy] = []
        self.stored = self.loaded = self.evicted = 0

    def use(self, memory: HostMemory | None) -> None:
        """Keep content in other memory from now on. Nothing is kept: see clear()."""
        assert not self._kept, "the tier still keeps content"
        self.settle()
        self._memory = memory

    def __len__(self) -> int:
        """Number of blocks kept."""
        return len(self._kept)

    def __contains__(self, hash: BlockHash) -> bool:
        return hash in self._kept

    def hashes(self) -> list[BlockHash]:
        """Kept hashes in the order of eviction."""
        return list(self._kept)

    def chunks(self) -> list[BlockHash]:
        """Kept hashes whose block ends a chunk."""
        return [hash for hash, kept in self._kept.items() if kept.ends_chunk]

    def keep(
        self, hash: BlockHash, block: BlockId, *, ends_chunk: bool
    ) -> list[tuple[BlockHash, bool]]:
        """Keep the content of `block`, which is about to be reused, under `hash`.

        Returns the content that is lost as (hash, whether it ends a chunk): the hash evicted to
        make room, or `hash` itself if the tier has no slots or only claimed content.
        """
        if not self.num_slots:
            return [(hash, ends_chunk)]
        if hash in self._kept:
            self._kept.move_to_end(hash)
            return []
        lost, slot = [], len(self._kept)
        if slot == self.num_slots:
            oldest = next(iter(self._kept))
            if oldest in self._claimed:
                return [(hash, ends_chunk)]
            slot, ended_chunk = self._kept.pop(oldest)
            lost.append((oldest, ended_chunk))
            self.evicted += 1
        self._kept[hash] = KeptBlock(slot, ends_chunk)
        self._due.append(Copy(True, block, slot))
        self.stored += 1
        return lost

    def claim(self, hashes: Sequence[BlockHash]) -> None:
        """Keep these hashes until bring() is called, and mark them as just used. A chain's tail is
        evicted before its head."""
        for hash in reversed(hashes):
            self._kept.move_to_end(hash)
        self._claimed = frozenset(hashes)

    def bring(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> list[bool]:
        """Queue copies of kept hashes into the first `blocks`. Returns for each hash whether it
        ends a chunk."""
        self._claimed = frozenset()
        slots = [self._kept[hash] for hash in hashes]
        for kept, block in zip(slots, blocks, strict=False):
            self._due.append(Copy(False, block, kept.slot))
        self.loaded += len(slots)
        return [kept.ends_chunk for kept in slots]

    def clear(self) -> None:
        """Forget all kept content. Copies that were decided are made."""
        self.move()
        self.evicted += len(self._kept)
        self._kept.clear()

    def move(self) -> None:
        """Start the queued copies, in order."""
        due, self._due = self._due, []
        for out, copies in groupby(due, key=lambda copy: copy.out):
            assert self._memory is not None, "copies are due, and there is no memory"
            _, blocks, slots = zip(*copies, strict=True)
            if out:
                self._memory.save(blocks, slots)
            else:
                self._memory.load(slots, blocks)

    def settle(self) -> None:
        """Make the queued copies and wait until all copies are done, also those of earlier steps:
        a reservation may share blocks that they load. Needed before anything but a later step uses
        the blocks, such as a transfer."""
        self.move()
        if self._memory is not None:
            self._memory.settle()

    def fault(self) -> str:
        """Describe an inconsistency, or return "". Each used slot must hold exactly one hash."""
        slots = sorted(kept.slot for kept in self._kept.values())
        if slots != list(range(len(slots))) or len(slots) > self.num_slots:
            return f"{len(slots)} hashes are kept in slots {slots} of {self.num_slots}"
        if self._memory is not None and self.stored - self.evicted != len(slots):
            return f"{self.stored} stored - {self.evicted} evicted != {len(slots)} kept"
        return ""
