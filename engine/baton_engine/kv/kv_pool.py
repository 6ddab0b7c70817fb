"""The paged KV pool as bytes, for transfers, and as typed tensors, for attention.

In: layout and block count. Out: `pool`, the blocks as bytes [P, Z]; `group_fields`, for each group
and field a typed view [P, L, K, B, H] of the same memory; and KVMemory's read, write and views for
transfers. On a CPU sockets can read and write the memory directly. On CUDA, each transfer thread
copies bytes through its own pinned buffer (see `device_copies`).

Shapes: P blocks with block 0 (padding), Z bytes of a block, L layers for which a block has room
(see KVLayout.layer_slots), K heads of a field, B block size, H numbers of a field's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from baton_engine.errors import SettingsError
from baton_engine.kv.device_copies import DeviceCopies
from baton_engine.kv.head_shards import Bytes, HeadShards, widest_word
from baton_engine.kv.staging import stage
from baton_engine.memory.malloc import empty_pages
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


class TorchMemory:
    """KVMemory over the pool.

    Several threads may call read() and write() at once, on blocks that are held. Steps that start
    after write() returned see its data. `data` and `into` hold one head shard of whole blocks.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        shape = num_blocks + 1, layout.block_bytes
        self._bytes: Bytes | None = None
        try:
            if device.type == "cpu":
                # The kernel allocates pages at first use. Touch them now: otherwise the steps of
                # the first requests take a tenth longer.
                self._bytes = np.zeros(shape, np.uint8)
                self.pool = torch.from_numpy(self._bytes).zero_()
            else:
                self.pool = torch.zeros(shape, dtype=torch.uint8, device=device)
        except (MemoryError, RuntimeError) as error:
            raise SettingsError(
                f"no memory for {num_blocks} KV blocks ({shape[0] * shape[1]} bytes); "
                "lower --kv-memory, --kv-blocks or --gpu-memory-utilization"
            ) from error
        views, shards = {}, {}
        for group in set(layout.divisions):
            views[group] = field_views(self.pool, layout, group)
            shards[group] = HeadShards(self.pool, layout, group)
        self.group_fields: Sequence[Mapping[str, torch.Tensor]] = [
            views[group] for group in layout.divisions
        ]
        self._shards = [shards[group] for group in layout.divisions]
        self._words = self.pool.view(widest_word(layout.block_bytes))
        self._share = layout.block_bytes // layout.kv_shards
        self._copies = DeviceCopies(device, self._share)

    def free(self) -> None:
        """Give the pool's memory back. Its views stay valid after restore(), and on a CPU its
        addresses, too: other threads may have them. Nobody reads or writes it meanwhile."""
        if self._bytes is not None:
            empty_pages(self._bytes.ctypes.data, self._bytes.nbytes)
        else:
            self.pool.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory again, as zeros. Raises SettingsError if there is none."""
        try:
            if self._bytes is None:
                self.pool.untyped_storage().resize_(self.pool.nbytes)
            self.pool.zero_()
        except RuntimeError as error:
            raise SettingsError(
                f"no memory for the KV pool of {self.pool.nbytes} bytes: others have taken it"
                " while the engine slept"
            ) from error

    @property
    def fields(self) -> Mapping[str, torch.Tensor]:
        """The views of the first group, and of all if no group has fields of its own."""
        return self.group_fields[0]

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        target = self._rows(into, len(blocks))
        if self._bytes is not None:
            for parts, pieces in self._shards[group].pieces(target, shard):
                for index, block in enumerate(blocks):
                    np.copyto(parts[index], pieces[block])  # releases the GIL
            return
        shards = self._shards[group]
        self._copies.read(blocks, target, lambda chosen: shards.gather(chosen, shard))

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        source = self._rows(data, len(blocks))
        if self._bytes is not None:
            for parts, pieces in self._shards[group].pieces(source, shard):
                for index, block in enumerate(blocks):
                    np.copyto(pieces[block], parts[index])
            return
        shards = self._shards[group]
        self._copies.write(
            blocks, source, lambda moved, chosen: shards.scatter(moved, chosen, shard)
        )

    def views(self, blocks: Sequence[BlockId]) -> list[memoryview] | None:
        if self._bytes is None or self.layout.kv_shards != 1:
            return None
        return [memoryview(self._bytes[block]) for block in blocks]

    def _rows(self, data: memoryview, count: int) -> Bytes:
        """View a transfer's buffer as [count, bytes of one block's shard]."""
        return np.frombuffer(data, np.uint8).reshape(count, self._share)

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy whole blocks, on the step's stream."""
        if self._bytes is not None:
            self._bytes[list(targets)] = self._bytes[list(sources)]
            return
        source, target = stage(np.array([sources, targets], np.int64), self.pool.device)
        self._words.index_copy_(0, target, self._words.index_select(0, source))

    def clear(self, blocks: Sequence[BlockId]) -> None:
        """Zero whole blocks, on the step's stream."""
        if self._bytes is not None:
            self._bytes[list(blocks)] = 0
            return
        index = stage(np.asarray(blocks, np.int64), self.pool.device)
        self._words.index_fill_(0, index, 0)


def field_views(pool_PZ: torch.Tensor, layout: KVLayout, group: int = 0) -> dict[str, torch.Tensor]:
    """The typed view [P, L, K, B, H] of each field of a group's layers in blocks of bytes. Raises
    SettingsError if a field does not begin at a multiple of its number's size."""
    views, begin, size = {}, 0, layout.block_size
    layer_bytes, block_bytes = layout.layer_bytes(group), layout.block_bytes
    for field in layout.group_fields[group]:
        dtype = TORCH_DTYPES[field.dtype]
        item = dtype.itemsize
        if begin % item or layer_bytes % item or block_bytes % item:
            raise SettingsError(
                f"{field.name} begins at byte {begin} of {layer_bytes} of a layer, which "
                f"does not fit {field.dtype}; use another --block-size"
            )
        rows = size * field.size
        views[field.name] = pool_PZ.view(dtype).as_strided(
            (len(pool_PZ), layout.layer_slots(group), field.heads, size, field.size),
            (block_bytes // item, layer_bytes // item, rows, field.size, 1),
            begin // item,
        )
        begin += size * field.token_bytes
    return views
