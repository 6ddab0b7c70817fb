"""The inputs of a plain decode step: one buffer, one copy to the device.

In: a Batch. Out: its numbers in a device buffer with fixed addresses: first the numbers per line,
then the block table. 256 lines of 40,960 tokens are 2.6 MB, which takes 50 us on an H100's bus; 256
lines of 4,096 tokens take 5 us.

A padding line is token 0 at position 0 in block 0, which belongs to no request, and its KV is not
stored. Padding is written again in each step, because an earlier step may have used the line.

Shapes: P lines including padding, R real lines, M maximum number of blocks of a line.
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

# Parts of the buffer begin at multiples of this number of int32 (128 bytes): triton compiles a
# kernel again for a pointer that is not a multiple of 16 bytes.
ALIGNMENT = 32
STAGING_BUFFERS = 2

Array = TypeVar("Array", npt.NDArray[Any], torch.Tensor)


@dataclass(frozen=True, slots=True)
class Inputs(Generic[Array]):
    """A step's inputs, as views of one int32 buffer on the host or the device.

    `after_P` is the index of the previous step's sample that is the line's token, -1 for none.
    `lengths_P` counts the tokens of a line, the new one included. `slots_P` are KV slots, -1 for
    none. `columns_6P` are the sampling columns (see `sampling.metadata`).
    """

    after_P: Array
    tokens_P: Array
    positions_P: Array
    lengths_P: Array
    slots_P: Array  # int64
    columns_6P: Array
    table_PM: Array


def inputs_in(buffer: Array, lines: int, width: int) -> Inputs[Array]:
    """Views of `buffer` for `lines` lines with tables of `width` blocks."""
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
    """Size of the buffer in int32."""
    return sum(map(_aligned, _sizes(lines, width)))


def _sizes(lines: int, width: int) -> list[int]:
    return [lines] * 4 + [2 * lines, COLUMNS * lines, lines * width]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Copied(Protocol):
    """The methods of torch.cuda.Event that Staging uses to wait for a copy."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """A device buffer with a fixed address, and the host buffers it is filled from.

    The host buffers `hosts` are used in turn, each after its last copy is done. Without `hosts`
    (on a CPU) the host writes the buffer itself.
    """

    def __init__(
        self, size: int, device: torch.device, hosts: Sequence[tuple[torch.Tensor, Copied]] = ()
    ) -> None:
        """`size` in int32."""
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = deque(hosts)

    def next(self) -> npt.NDArray[np.int32]:
        """The next host buffer to write. It still has the content of an earlier step."""
        if not self._hosts:
            return self.buffer.numpy()
        self._hosts.rotate()
        host, copied = self._hosts[0]
        copied.synchronize()
        return host.numpy()

    def send(self, size: int) -> None:
        """Copy the first `size` numbers of the current host buffer to the device, on the step's
        stream."""
        if self._hosts:
            host, copied = self._hosts[0]
            self.buffer[:size].copy_(host[:size], non_blocking=True)
            copied.record()


def staging_for(size: int, device: torch.device) -> Staging:
    """A Staging of `size` int32. On CUDA it has several pinned host buffers, because a copy may not
    have started when the host writes the next step's inputs."""
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
    """Write the inputs of a batch, and padding after its lines.

    `after_R` has the values of Inputs.after_P; None if no row awaits a token. Without `tables`, the
    lengths, slots and block tables of the batch are not written.
    """
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
    """Make the lines from `rows` on padding: greedy, one token in block 0, KV not stored."""
    host.after_P[rows:] = -1
    host.tokens_P[rows:] = 0
    host.positions_P[rows:] = 0
    host.lengths_P[rows:] = 1
    host.slots_P[rows:] = -1
    host.columns_6P[:, rows:] = 0
    host.table_PM[rows:, :1] = 0
