"""The host tier: bounded host memory for blocks that the paged cache evicts.

In: a hash and the block that holds it, when the block is about to be used for something else;
hashes that a request looks for behind what the paged cache has. Out: copies between blocks and
slots of host memory, and which hashes are nowhere any more.

A block that goes to the tier stays there also when it has come back: its content never changes, so
the next eviction copies nothing. The hash used longest ago makes room. Copies are noted when they
are decided, and made in that order by move(), before anything else reads or writes the blocks: a
copy out finds what was there before, a copy in may come from a slot that is used anew right after.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np

from baton_engine.errors import SettingsError
from baton_engine.interface import KVMemory
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVLayout


class HostMemory(Protocol):
    """Room for whole blocks, by slot. Copies are made in the order of the calls, behind the steps
    before them and ahead of those after them; settle() returns when they are done."""

    num_slots: int
    slot_bytes: int

    def save(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None: ...

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId]) -> None: ...

    def settle(self) -> None: ...


def slots_for(host_kv_memory: int, layout: KVLayout) -> int:
    """Blocks that fit into so many bytes; raise SettingsError where there is room for none."""
    if not host_kv_memory:
        return 0
    if host_kv_memory < layout.block_bytes:
        raise SettingsError(
            f"--host-kv-memory {host_kv_memory} holds no block of {layout.block_bytes} bytes; "
            "raise it, or use 0 for no host tier"
        )
    return host_kv_memory // layout.block_bytes


def no_memory(num_slots: int, slot_bytes: int) -> SettingsError:
    return SettingsError(
        f"no host memory for {num_slots} KV blocks ({num_slots * slot_bytes} bytes); "
        "lower --host-kv-memory"
    )


class CopiedBlocks:
    """HostMemory beside a KVMemory whose own bytes are in host memory too."""

    def __init__(self, memory: KVMemory, num_slots: int) -> None:
        layout = memory.layout
        self.num_slots = num_slots
        self.slot_bytes = layout.block_bytes
        self._memory = memory
        self._shards = range(layout.kv_shards)
        share = layout.block_bytes // layout.kv_shards
        try:  # the kernel hands pages out when first touched
            self._slots = np.empty((num_slots, layout.kv_shards, share), np.uint8)
        except (MemoryError, ValueError) as error:
            raise no_memory(num_slots, layout.block_bytes) from error

    def save(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            for shard in self._shards:
                self._memory.read([block], self._slots[slot, shard].data, shard)

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            for shard in self._shards:
                self._memory.write([block], self._slots[slot, shard].data, shard)

    def settle(self) -> None:
        """Each copy is done when its call returns."""


class KeptBlock(NamedTuple):
    slot: int
    ends_chunk: bool


class Copy(NamedTuple):
    out: bool  # from the block to the slot, else back
    block: BlockId
    slot: int


class HostTier:
    """Which hash is in which slot, the copies that are due, and counters in blocks. Without memory
    it keeps nothing."""

    def __init__(self, memory: HostMemory | None = None) -> None:
        self._memory = memory
        self.num_slots = memory.num_slots if memory is not None else 0
        self.slot_bytes = memory.slot_bytes if memory is not None else 0
        self._kept: OrderedDict[BlockHash, KeptBlock] = OrderedDict()  # used longest ago first
        self._due: list[Copy] = []
        self.stored = self.loaded = self.evicted = 0

    def __len__(self) -> int:
        """Blocks kept."""
        return len(self._kept)

    def __contains__(self, hash: BlockHash) -> bool:
        return hash in self._kept

    def hashes(self) -> list[BlockHash]:
        """What is kept, the one that goes next in front."""
        return list(self._kept)

    def chunks(self) -> list[BlockHash]:
        """Of those, the ones that end a chunk."""
        return [hash for hash, kept in self._kept.items() if kept.ends_chunk]

    def leading(self, hashes: Iterable[BlockHash]) -> int:
        """How many of the hashes are kept, up to the first that is not."""
        count = 0
        for hash in hashes:
            if hash not in self._kept:
                break
            count += 1
        return count

    def keep(
        self, hash: BlockHash, block: BlockId, *, ends_chunk: bool
    ) -> list[tuple[BlockHash, bool]]:
        """The block will hold something else: keep what it holds under `hash`. Return what the tier
        has lost by that, (hash, whether it ends a chunk)."""
        if not self.num_slots:
            return [(hash, ends_chunk)]
        if hash in self._kept:
            self._kept.move_to_end(hash)
            return []
        lost, slot = [], len(self._kept)
        if slot == self.num_slots:
            oldest, (slot, ended_chunk) = self._kept.popitem(last=False)
            lost.append((oldest, ended_chunk))
            self.evicted += 1
        self._kept[hash] = KeptBlock(slot, ends_chunk)
        self._due.append(Copy(True, block, slot))
        self.stored += 1
        return lost

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """The leading ones that are kept were used now; a chain's tail goes before its head."""
        for hash in reversed(hashes[: self.leading(hashes)]):
            self._kept.move_to_end(hash)

    def bring(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> list[bool]:
        """Have the leading ones that are kept copied into the first blocks; return of each whether
        it ends a chunk."""
        found = [self._kept[hash] for hash in hashes[: self.leading(hashes)]]
        for kept, block in zip(found, blocks, strict=False):
            self._due.append(Copy(False, block, kept.slot))
        self.loaded += len(found)
        return [kept.ends_chunk for kept in found]

    def move(self) -> None:
        """Make the copies that are due."""
        due, self._due = self._due, []
        for out, copies in groupby(due, key=lambda copy: copy.out):
            assert self._memory is not None, "copies are due, and there is no memory"
            _, blocks, slots = zip(*copies, strict=True)
            if out:
                self._memory.save(blocks, slots)
            else:
                self._memory.load(slots, blocks)

    def settle(self) -> None:
        """Make the copies that are due, and return when they are done: others than the next step
        may use the blocks."""
        self.move()
        if self._memory is not None:
            self._memory.settle()

    def fault(self) -> str:
        """What is wrong with the books, "" if nothing is: the slots in use hold one hash each."""
        slots = sorted(kept.slot for kept in self._kept.values())
        if slots != list(range(len(slots))) or len(slots) > self.num_slots:
            return f"{len(slots)} hashes are kept in slots {slots} of {self.num_slots}"
        if self._memory is not None and self.stored - self.evicted != len(slots):
            return f"{self.stored} stored - {self.evicted} evicted != {len(slots)} kept"
        return ""
