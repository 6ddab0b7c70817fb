"""Host memory for whole blocks of KV: where the host tier keeps what the pool evicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from baton_engine.errors import SettingsError
from baton_engine.interface import KVMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout


class HostMemory(Protocol):
    """Host memory for `num_slots` whole blocks of `slot_bytes` bytes each.

    Copies run in the order of the calls, and before the steps launched after them. They may run
    beside the steps in flight: those hold a reference to each block that they use, and a copy's
    block was free until it was allocated for a later step. settle() returns when all copies are
    done, and at once if none was made since the last settle().
    """

    num_slots: int
    slot_bytes: int

    def save(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None: ...

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId]) -> None: ...

    def settle(self) -> None: ...


def slots_for(host_kv_memory: int, layout: KVLayout) -> int:
    """Number of blocks that fit into `host_kv_memory` bytes; 0 bytes means no host tier. Raises
    SettingsError if a positive size is smaller than one block."""
    if not host_kv_memory:
        return 0
    if host_kv_memory < layout.block_bytes:
        raise SettingsError(
            f"--host-kv-memory {host_kv_memory} holds no block of {layout.block_bytes} bytes; "
            "raise it, or use 0 for no host tier"
        )
    return host_kv_memory // layout.block_bytes


def no_memory(num_slots: int, slot_bytes: int, why: str = "") -> SettingsError:
    return SettingsError(
        f"no host memory for {num_slots} KV blocks ({num_slots * slot_bytes} bytes)"
        f"{f': {why}' if why else ''}; lower --host-kv-memory"
    )


class CopiedBlocks:
    """HostMemory for a KVMemory whose pool is in host memory, too."""

    def __init__(self, memory: KVMemory, num_slots: int) -> None:
        layout = memory.layout
        self.num_slots = num_slots
        self.slot_bytes = layout.block_bytes
        self._memory = memory
        self._shards = range(layout.kv_shards)
        share = layout.block_bytes // layout.kv_shards
        try:  # the kernel allocates pages at first use
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
        """Does nothing: each copy is done when its call returns."""
