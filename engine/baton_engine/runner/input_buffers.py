"""A step's arrays on the device: one buffer, one copy.

In: StepArrays on the host. Out: the same numbers on the device. Recorded steps read them from a
buffer with a fixed address, padded to a fixed shape. Block tables are last in the buffer, with the
first blocks of all rows before the second ones, so the part that a step uses is one piece. 256
lines of 1,024 tokens are 66 KB. Tables of full width would be 2.6 MB for a limit of 40,960 tokens,
which takes 50 us on an H100's bus.

A padding line is token 0 at position 0 in block 0, which belongs to no request, and its KV is not
stored. Padding is written again in each step, because an earlier step may have used the line.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.attention.interface import Array, GroupArrays, StepArrays
from baton_engine.kv.staging import stage

# Parts of the buffer begin at multiples of this number of int32 (128 bytes): triton compiles a
# kernel again for a pointer that is not a multiple of 16 bytes.
ALIGNMENT = 32
# Shapes whose places are kept: those of recorded steps, and some of other steps.
SHAPES_KEPT = 256
Host = StepArrays[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's arrays; `width` is the number of blocks of a row in one KV group."""

    tokens: int
    rows: int
    width: int
    groups: int

    @classmethod
    def of(cls, arrays: Host) -> StepShape:
        rows, width = arrays.groups[0].table_RM.shape
        return cls(len(arrays.tokens_T), rows, width, len(arrays.groups))

    @property
    def size(self) -> int:
        """Size of a buffer in int32."""
        return self.used(self.width)

    def used(self, width: int) -> int:
        """Size in int32 of the part of a buffer that has the first `width` blocks of each row."""
        return _aligned(_parts(self)[-1].start + width * self.groups * self.table_step)

    @property
    def table_step(self) -> int:
        """From a row's block in one group to its block in the next: each table must begin at a
        multiple of 16 bytes, too."""
        return -(-self.rows // 4) * 4

    def arrays_in(self, buffer: Array) -> StepArrays[Array]:
        """Views of an int32 buffer."""
        views: list[Any] = [buffer[part] for part in _parts(self)]
        wide: Any = torch.int64 if isinstance(buffer, torch.Tensor) else np.int64
        tokens, positions, awaits, starts, lengths, *slots, tables = views
        table_MGR = tables.reshape(self.width, self.groups, self.table_step)
        groups = tuple(
            GroupArrays(table_MGR[:, group, : self.rows].T, slots_T.view(wide))
            for group, slots_T in enumerate(slots)
        )
        return StepArrays(tokens, positions, awaits, starts, lengths, groups)


@functools.lru_cache(maxsize=SHAPES_KEPT)
def _parts(shape: StepShape) -> list[slice]:
    """The places in the buffer of the five arrays of tokens and rows, of each group's slots, and of
    the tables of all groups."""
    slots = [2 * shape.tokens] * shape.groups
    sizes = [*[shape.tokens] * 3, shape.rows + 1, shape.rows, *slots]
    begins = [*accumulate(map(_aligned, sizes), initial=0)]
    tables = slice(begins[-1], begins[-1] + shape.width * shape.groups * shape.table_step)
    parts = zip(begins, sizes, strict=False)
    return [*(slice(begin, begin + size) for begin, size in parts), tables]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def to_device(arrays: Host, device: torch.device) -> StepArrays[torch.Tensor]:
    """The arrays on the device, sent in one copy. On a CPU they share the host's memory."""
    if device.type == "cpu":
        tokens, positions, awaits, starts, lengths = map(torch.from_numpy, _flat(arrays))
        groups = tuple(
            GroupArrays(torch.from_numpy(group.table_RM), torch.from_numpy(group.slots_T))
            for group in arrays.groups
        )
        return StepArrays(tokens, positions, awaits, starts, lengths, groups)
    shape = StepShape.of(arrays)
    buffer = np.zeros(shape.size, np.int32)
    fill(shape.arrays_in(buffer), arrays)
    return shape.arrays_in(stage(buffer, device))


def _flat(arrays: Host) -> list[npt.NDArray[Any]]:
    tokens = [arrays.tokens_T, arrays.positions_T, arrays.awaits_T]
    return [*tokens, arrays.query_starts_R1, arrays.seq_lens_R]


def fill(into: Host, arrays: Host) -> None:
    """Write a step's arrays, and padding after them. With padding, all rows have one token."""
    for target, source in zip(_flat(into), _flat(arrays), strict=True):
        target[: len(source)] = source
    for group, source_group in zip(into.groups, arrays.groups, strict=True):
        rows, width = source_group.table_RM.shape
        group.table_RM[:rows, :width] = source_group.table_RM
        group.slots_T[: len(source_group.slots_T)] = source_group.slots_T
    if len(arrays.seq_lens_R) < len(into.seq_lens_R):
        pad(into, len(arrays.seq_lens_R))


def idle(rows: Sequence[tuple[int, int]], block_size: int, groups: int) -> Host:
    """A step for warm-up, from each row's numbers of new and of all tokens: the tokens are in block
    0, and their KV is not stored."""
    counts, lengths = np.array(rows, np.int32).T
    tokens, width = int(counts.sum()), -(-int(lengths.max()) // block_size)
    shape = StepShape(tokens, len(rows), width, groups)
    arrays = shape.arrays_in(np.zeros(shape.size, np.int32))
    arrays.awaits_T[:] = -1
    arrays.query_starts_R1[1:] = counts.cumsum()
    arrays.seq_lens_R[:] = lengths
    for group in arrays.groups:
        group.slots_T[:] = -1
    return arrays


def pad(into: Host, rows: int) -> None:
    """Make the lines from `rows` on padding: one token in block 0, whose KV is not stored."""
    into.tokens_T[rows:] = into.positions_T[rows:] = 0
    into.awaits_T[rows:] = -1
    into.query_starts_R1[rows:] = np.arange(rows, len(into.query_starts_R1))
    into.seq_lens_R[rows:] = 1
    for group in into.groups:
        group.table_RM[rows:, :1] = 0
        group.slots_T[rows:] = -1
