"""The paged KV pool as one tensor, and as bytes for transfers.

In: layout and block count. Out: `pool` [P, L, 2, K, B, H] for attention, and KVMemory's read and
write for the data plane. On a CPU both are the same memory. On CUDA bytes go through pinned staging
buffers, one per transfer thread, on a stream of their own.

Shapes: P blocks with block 0 (padding), L layers, K kv heads, B block size, H head_dim.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from baton_engine.errors import SettingsError
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
STAGING_BYTES = 8 << 20

Bytes2D = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


def stage(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A host array on the device. On CUDA through pinned memory, so that the copy overlaps; the
    caching host allocator keeps the staging alive until the copy is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class TorchMemory:
    """KVMemory over the pool. read() and write() may be called by several threads at once, on
    blocks that are held; writes are visible to steps started after write() returned."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        shape = (
            num_blocks + 1,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        dtype = TORCH_DTYPES[layout.dtype]
        self._bytes: Bytes2D | None = None
        try:
            if device.type == "cpu":
                # numpy's zeros come from calloc: the kernel hands pages out when first touched.
                self._bytes = np.zeros((num_blocks + 1, layout.block_bytes), np.uint8)
                self.pool = torch.from_numpy(self._bytes).view(dtype).view(shape)
            else:
                self.pool = torch.zeros(shape, dtype=dtype, device=device)
        except (MemoryError, RuntimeError) as error:
            size = (num_blocks + 1) * layout.block_bytes
            raise SettingsError(
                f"no memory for {num_blocks} KV blocks ({size} bytes); "
                "lower --kv-memory or --kv-blocks"
            ) from error
        self._local = threading.local()

    def read(self, blocks: Sequence[BlockId], into: memoryview) -> None:
        target = np.frombuffer(into, np.uint8).reshape(len(blocks), self.layout.block_bytes)
        if self._bytes is not None:
            for index, block in enumerate(blocks):
                np.copyto(target[index], self._bytes[block])  # releases the GIL
            return
        stream, staging = self._staging()
        with torch.cuda.stream(stream):
            for begin, end in self._portions(len(blocks), staging):
                chosen = torch.tensor(blocks[begin:end], device=self.pool.device)
                gathered = self.pool.index_select(0, chosen).view(end - begin, -1)
                part = staging[: end - begin]
                part.copy_(gathered.view(torch.uint8), non_blocking=True)
                stream.synchronize()
                np.copyto(target[begin:end], part.numpy())

    def write(self, blocks: Sequence[BlockId], data: memoryview) -> None:
        source = np.frombuffer(data, np.uint8).reshape(len(blocks), self.layout.block_bytes)
        if self._bytes is not None:
            for index, block in enumerate(blocks):
                np.copyto(self._bytes[block], source[index])
            return
        stream, staging = self._staging()
        with torch.cuda.stream(stream):
            for begin, end in self._portions(len(blocks), staging):
                part = staging[: end - begin]
                np.copyto(part.numpy(), source[begin:end])
                chosen = torch.tensor(blocks[begin:end], device=self.pool.device)
                moved = part.to(self.pool.device, non_blocking=True).view(self.pool.dtype)
                self.pool.index_copy_(0, chosen, moved.view(end - begin, *self.pool.shape[1:]))
                stream.synchronize()  # the staging is reused, and the step stream may read now

    def clear(self, blocks: Sequence[BlockId]) -> None:
        """Zero whole blocks, in the order of the step's own work."""
        if self._bytes is not None:
            self._bytes[list(blocks)] = 0
            return
        index = stage(np.asarray(blocks, np.int64), self.pool.device)
        self.pool.index_fill_(0, index, 0)

    def _staging(self) -> tuple[torch.cuda.Stream, torch.Tensor]:
        """This thread's stream and pinned buffer [blocks, block bytes]."""
        found: tuple[torch.cuda.Stream, torch.Tensor] | None = getattr(self._local, "value", None)
        if found is None:
            blocks = max(1, STAGING_BYTES // self.layout.block_bytes)
            buffer = torch.empty(
                (blocks, self.layout.block_bytes), dtype=torch.uint8, pin_memory=True
            )
            stream = torch.cuda.Stream(self.pool.device)  # type: ignore[no-untyped-call]
            found = stream, buffer
            self._local.value = found
        return found

    def _portions(self, count: int, staging: torch.Tensor) -> list[tuple[int, int]]:
        step = staging.shape[0]
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]
