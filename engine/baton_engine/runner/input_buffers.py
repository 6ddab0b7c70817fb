"""The inputs of a plain decode step: one buffer, one copy.

In: a batch by line. Out: its numbers on the device, where they always lie: what there is per line,
then the table of blocks. 256 lines of 40,960 tokens are 2.6 MB, 50 us of an H100's bus; of 4,096
tokens 5 us.

A line of padding is token 0 at position 0 over block 0, which is nobody's, and its KV has no slot;
it is written anew at each step, since what stood there was somebody's.

Shapes: P lines with padding, R of them real, M blocks that a line may have at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.runner.batch_layout import Ints
from baton_engine.runner.input_batch import Batch, BlockTables
from baton_engine.sampling.metadata import COLUMNS

# Parts of the buffer begin at multiples of this many int32 (128 bytes): triton compiles a kernel
# anew for a pointer that is not a multiple of 16 bytes.
ALIGNMENT = 32
STAGING_BUFFERS = 2

Array = TypeVar("Array", npt.NDArray[Any], torch.Tensor)


@dataclass(frozen=True, slots=True)
class Inputs(Generic[Array]):
    """A step's inputs, as parts of one int32 buffer of the host or of the device."""

    after_P: Array
    tokens_P: Array
    positions_P: Array
    lengths_P: Array
    slots_P: Array  # int64
    columns_6P: Array
    table_PM: Array


def inputs_in(buffer: Array, lines: int, width: int) -> Inputs[Array]:
    """Those of `lines` lines, and tables of `width` blocks, from the buffer's beginning."""
    parts: list[Any] = []
    begin = 0
    for size in _sizes(lines, width):
        parts.append(buffer[begin : begin + size])
        begin += _aligned(size)
    wide: Any = torch.int64 if isinstance(buffer, torch.Tensor) else np.int64
    return Inputs(
        after_P=parts[0],
        tokens_P=parts[1],
        positions_P=parts[2],
        lengths_P=parts[3],
        slots_P=parts[4].view(wide),
        columns_6P=parts[5].reshape(COLUMNS, lines),
        table_PM=parts[6].reshape(lines, width),
    )


def inputs_size(lines: int, width: int) -> int:
    """In int32."""
    return sum(map(_aligned, _sizes(lines, width)))


def _sizes(lines: int, width: int) -> list[int]:
    return [lines] * 4 + [2 * lines, COLUMNS * lines, lines * width]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Copied(Protocol):
    """What torch.cuda.Event does for a copy that was begun."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """A buffer on the device that keeps its place, and the host's side of it: `hosts`, written in
    turn, each once its last copy is over; without any the buffer itself, on a CPU."""

    def __init__(
        self, size: int, device: torch.device, hosts: Sequence[tuple[torch.Tensor, Copied]] = ()
    ) -> None:
        """`size` in int32."""
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = deque(hosts)

    def next(self) -> npt.NDArray[np.int32]:
        """What the host may write now; what stands in it is old."""
        if not self._hosts:
            return self.buffer.numpy()
        self._hosts.rotate()
        host, copied = self._hosts[0]
        copied.synchronize()
        return host.numpy()

    def send(self, size: int) -> None:
        """Copy the first `size` numbers of what was written, in the order of the step's work."""
        if self._hosts:
            host, copied = self._hosts[0]
            self.buffer[:size].copy_(host[:size], non_blocking=True)
            copied.record()


def staging_for(size: int, device: torch.device) -> Staging:
    """On CUDA with pinned buffers, since a copy may not have begun when the next step is made."""
    if device.type == "cpu":
        return Staging(size, device)
    hosts = [
        (torch.zeros(size, dtype=torch.int32, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
        for _ in range(STAGING_BUFFERS)
    ]
    return Staging(size, device, hosts)


def fill(
    host: Inputs[npt.NDArray[Any]], batch: Batch, after_R: Ints | None, tables: BlockTables | None
) -> None:
    """Write all that a step of this batch reads; `after_R` as Inputs has it, None if no row waits.
    Without `tables` nothing is written of where rows have their KV."""
    rows = len(batch.rows)
    host.after_P[:rows] = -1 if after_R is None else after_R
    host.tokens_P[:rows] = batch.tokens_R
    host.positions_P[:rows] = batch.starts_R
    host.columns_6P.view(np.uint32)[:, :rows] = batch.columns_6R
    if tables is not None:
        host.lengths_P[:rows] = batch.starts_R + 1
        host.slots_P[:rows] = tables.slots()
        used = int(tables.counts_R.max())
        host.table_PM[:rows, :used] = tables.table_RW[:, :used]
    if rows < len(host.tokens_P):
        pad(host, rows)


def pad(host: Inputs[npt.NDArray[Any]], rows: int) -> None:
    """Greedy, and of one token in block 0 that is not stored."""
    host.after_P[rows:] = -1
    host.tokens_P[rows:] = 0
    host.positions_P[rows:] = 0
    host.lengths_P[rows:] = 1
    host.slots_P[rows:] = -1
    host.columns_6P[:, rows:] = 0
    host.table_PM[rows:, :1] = 0
