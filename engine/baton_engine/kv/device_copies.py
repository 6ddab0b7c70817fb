"""Copies between blocks on a CUDA device and host memory, in transfer threads.

In: blocks, and rows of host memory [blocks, bytes]. Each thread copies through its own pinned
buffer, on its own stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from baton_engine.kv.head_shards import Bytes
from baton_protocol.ids import BlockId

STAGING_BYTES = 8 << 20


class DeviceCopies:
    """For rows of `width` bytes."""

    def __init__(self, device: torch.device, width: int) -> None:
        self._device = device
        self._shape = max(1, STAGING_BYTES // width), width
        self._local = threading.local()

    def read(
        self,
        blocks: Sequence[BlockId],
        target: Bytes,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Copy what `gather` returns for some blocks: their bytes on the device, a row each."""
        for chosen, part, rows in self._portions(blocks, target):
            part.copy_(gather(chosen), non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
            np.copyto(rows, part.numpy())

    def write(
        self,
        blocks: Sequence[BlockId],
        source: Bytes,
        scatter: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Give `scatter` the bytes of some blocks on the device, and these blocks."""
        for chosen, part, rows in self._portions(blocks, source):
            np.copyto(part.numpy(), rows)
            scatter(part.to(self._device, non_blocking=True), chosen)
            # The next portion reuses the buffer, and steps may read.
            torch.cuda.current_stream(self._device).synchronize()

    def _portions(
        self, blocks: Sequence[BlockId], host: Bytes
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Bytes]]:
        """Blocks on the device, this thread's pinned buffer for them, and their rows of `host`, as
        many at a time as the buffer holds, with this thread's stream as the current one."""
        found: tuple[torch.cuda.Stream, torch.Tensor] | None = getattr(self._local, "value", None)
        if found is None:
            buffer = torch.empty(self._shape, dtype=torch.uint8, pin_memory=True)
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            found = self._local.value = stream, buffer
        stream, buffer = found
        with torch.cuda.stream(stream):
            for begin in range(0, len(blocks), len(buffer)):
                end = min(begin + len(buffer), len(blocks))
                chosen = torch.tensor(blocks[begin:end], device=self._device)
                yield chosen, buffer[: end - begin], host[begin:end]
