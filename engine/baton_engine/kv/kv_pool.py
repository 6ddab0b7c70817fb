"""The paged KV pool as one tensor, and as bytes for transfers.

In: layout and block count. Out: `pool` [P, L, 2, K, B, H] for attention, and KVMemory's read, write
and views for transfers. On a CPU both are the same memory, and sockets can read and write it
directly. On CUDA, each transfer thread copies bytes through its own pinned staging buffer on its
own stream.

Head shard s of a block has heads [s * K / S, (s + 1) * K / S) of each layer's K and V: 2 * L
contiguous pieces of the block.

Shapes: P blocks with block 0 (padding), L layers of a group (see KVLayout.group_layers), K kv
heads, S head shards, B block size, H head_dim.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.errors import SettingsError
from baton_engine.kv.staging import stage
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
STAGING_BYTES = 8 << 20

Bytes = npt.NDArray[np.uint8]


class TorchMemory:
    """KVMemory over the pool.

    Several threads may call read() and write() at once, on blocks that are held. Steps that start
    after write() returned see its data. `data` and `into` hold one head shard of whole blocks.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        shape = (
            num_blocks + 1,
            layout.group_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        dtype = TORCH_DTYPES[layout.dtype]
        self._bytes: Bytes | None = None
        try:
            if device.type == "cpu":
                # The kernel allocates pages at first use. Touch them now: otherwise the steps of
                # the first requests take a tenth longer.
                self._bytes = np.zeros((num_blocks + 1, layout.block_bytes), np.uint8)
                self.pool = torch.from_numpy(self._bytes).view(dtype).view(shape).zero_()
            else:
                self.pool = torch.zeros(shape, dtype=dtype, device=device)
        except (MemoryError, RuntimeError) as error:
            size = (num_blocks + 1) * layout.block_bytes
            raise SettingsError(
                f"no memory for {num_blocks} KV blocks ({size} bytes); "
                "lower --kv-memory, --kv-blocks or --gpu-memory-utilization"
            ) from error
        # Views of the pool by head shard: [P, 2 * L, S, bytes] and [P, 2 * L, S, K / S, B, H].
        shards = layout.kv_shards
        self._pieces: Bytes | None = None
        if self._bytes is not None:
            self._pieces = self._bytes.reshape(num_blocks + 1, 2 * layout.group_layers, shards, -1)
        self._heads = self.pool.view(
            num_blocks + 1,
            2 * layout.group_layers,
            shards,
            layout.num_kv_heads // shards,
            *shape[-2:],
        )
        self._share = layout.block_bytes // shards
        self._local = threading.local()

    def read(self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0) -> None:
        target = self._rows(into, len(blocks))
        if self._pieces is not None:
            parts = target.reshape(len(blocks), self._pieces.shape[1], -1)
            for index, block in enumerate(blocks):
                np.copyto(parts[index], self._pieces[block, :, shard])  # releases the GIL
            return
        stream, staging = self._staging()
        with torch.cuda.stream(stream):
            for begin, end in self._portions(len(blocks), staging):
                chosen = torch.tensor(blocks[begin:end], device=self.pool.device)
                gathered = self._heads[:, :, shard].index_select(0, chosen).view(end - begin, -1)
                part = staging[: end - begin]
                part.copy_(gathered.view(torch.uint8), non_blocking=True)
                stream.synchronize()
                np.copyto(target[begin:end], part.numpy())

    def write(self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0) -> None:
        source = self._rows(data, len(blocks))
        if self._pieces is not None:
            parts = source.reshape(len(blocks), self._pieces.shape[1], -1)
            for index, block in enumerate(blocks):
                np.copyto(self._pieces[block, :, shard], parts[index])
            return
        stream, staging = self._staging()
        heads = self._heads[:, :, shard]
        with torch.cuda.stream(stream):
            for begin, end in self._portions(len(blocks), staging):
                part = staging[: end - begin]
                np.copyto(part.numpy(), source[begin:end])
                chosen = torch.tensor(blocks[begin:end], device=self.pool.device)
                moved = part.to(self.pool.device, non_blocking=True).view(self.pool.dtype)
                heads.index_copy_(0, chosen, moved.view(end - begin, *heads.shape[1:]))
                stream.synchronize()  # the next portion reuses the staging, and steps may read

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
        self.pool.index_copy_(0, target, self.pool.index_select(0, source))

    def clear(self, blocks: Sequence[BlockId]) -> None:
        """Zero whole blocks, on the step's stream."""
        if self._bytes is not None:
            self._bytes[list(blocks)] = 0
            return
        index = stage(np.asarray(blocks, np.int64), self.pool.device)
        self.pool.index_fill_(0, index, 0)

    def _staging(self) -> tuple[torch.cuda.Stream, torch.Tensor]:
        """This thread's stream and pinned buffer [blocks, bytes of one block's shard]."""
        found: tuple[torch.cuda.Stream, torch.Tensor] | None = getattr(self._local, "value", None)
        if found is None:
            blocks = max(1, STAGING_BYTES // self._share)
            buffer = torch.empty((blocks, self._share), dtype=torch.uint8, pin_memory=True)
            stream = torch.cuda.Stream(self.pool.device)  # type: ignore[no-untyped-call]
            found = stream, buffer
            self._local.value = found
        return found

    def _portions(self, count: int, staging: torch.Tensor) -> list[tuple[int, int]]:
        step = staging.shape[0]
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]
