"""The pool as the store has it with a codec: rows of numbers as 8-bit codes and exponents.

In: the pool and its layout. Out: reads that encode blocks, and writes that decode them. The pool
holds rows that were rounded when they were stored (see `eight_bits`), so neither changes a bit.

On a CPU, kernels encode from the pool into the store's buffer in one pass. On a device, and for
rows that kernels do not support, torch's operators encode a copy of the blocks' bytes there.

Shapes: P blocks of the pool, L layers of the group, K heads of the shard, B block size, H numbers
of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.cpu_kernels.eight_bits import can_encode, decode_pieces, encode_pieces
from baton_engine.kv.device_copies import DeviceCopies
from baton_engine.kv.eight_bits import decoded, encoded
from baton_engine.kv.head_shards import Bytes, HeadShards
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVField, KVLayout


class EncodedMemory:
    """StoredMemory over the pool of a layout with a codec. Several threads may call it at once, on
    blocks that are held."""

    def __init__(self, memory: TorchMemory) -> None:
        self.layout = layout = memory.layout
        pool_PZ = memory.pool
        self._share = layout.stored_block_bytes // layout.kv_shards
        groups = {group: _EncodedGroup(pool_PZ, layout, group) for group in layout.divisions}
        self._groups = [groups[group] for group in layout.divisions]
        self._copies: DeviceCopies | None = None
        if pool_PZ.device.type != "cpu":
            self._copies = DeviceCopies(pool_PZ.device, self._share)

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        rows, own = self._rows(into, len(blocks)), self._groups[group]
        if self._copies is not None:
            self._copies.read(blocks, rows, lambda chosen: own.gather(chosen, shard))
        elif own.compiled:
            own.encode(blocks, rows, shard)
        else:
            np.copyto(rows, own.gather(torch.tensor(blocks), shard).numpy())

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        rows, own = self._rows(data, len(blocks)), self._groups[group]
        if self._copies is not None:
            self._copies.write(
                blocks, rows, lambda moved, chosen: own.scatter(moved, chosen, shard)
            )
        elif own.compiled:
            own.decode(blocks, rows, shard)
        else:
            own.scatter(torch.from_numpy(rows.copy()), torch.tensor(blocks), shard)

    def views(self, blocks: Sequence[BlockId]) -> None:
        """None: the store's bytes are not in the pool."""

    def _rows(self, data: memoryview, count: int) -> Bytes:
        """View a transfer's buffer as [count, bytes of one block's shard]."""
        return np.frombuffer(data, np.uint8).reshape(count, self._share)


@dataclass(frozen=True, slots=True)
class _Part:
    """One field's rows in a layer's part of a shard: their place in the codes' bytes, and in the
    numbers' bytes of a block in which all shards are."""

    field: KVField
    rows: int
    numbers: int
    shard_bytes: int
    codes: int
    exponents: int


class _EncodedGroup:
    """The blocks of a group, and of groups whose layers keep the same fields."""

    def __init__(self, pool_PZ: torch.Tensor, layout: KVLayout, group: int) -> None:
        fields = layout.group_fields[group]
        self._pool, self._shards = pool_PZ, HeadShards(pool_PZ, layout, group)
        self._numbers = TORCH_DTYPES[fields[0].dtype]
        alike = {group_of for group_of, first in enumerate(layout.divisions) if first == group}
        # Layers that no group has are unused bytes, in both forms.
        self._layers = max(len(layout.kv_groups[each].layers) for each in alike)
        self._layer_bytes = layout.layer_bytes(group)
        self._coded_bytes = layout.stored.layer_bytes(group) // layout.kv_shards
        self._kv_shards = layout.kv_shards
        self._width = layout.block_bytes // layout.kv_shards
        self._share = layout.stored_block_bytes // layout.kv_shards
        self._parts: list[_Part] = []
        numbers = codes = 0
        for field in fields:
            rows = layout.block_size * field.heads // layout.kv_shards
            size = rows * field.row_bytes
            ends = codes + rows * field.size
            self._parts.append(_Part(field, rows, numbers, size, codes, ends))
            numbers += size * layout.kv_shards
            codes = ends + rows
        assert {field.dtype for field in fields} == {fields[0].dtype}, "fields of several dtypes"
        shards = range(layout.kv_shards)
        self._of_a_block = [self._pieces_of_a_block(shard) for shard in shards]
        self.compiled = all(can_encode(self._numbers, field.size) for field in fields)

    def encode(self, blocks: Sequence[BlockId], rows: Bytes, shard: int) -> None:
        encode_pieces(self._pieces(blocks, rows, shard), self._numbers)
        rows[:, self._layers * self._coded_bytes :] = 0

    def decode(self, blocks: Sequence[BlockId], rows: Bytes, shard: int) -> None:
        decode_pieces(self._pieces(blocks, rows, shard), self._numbers)

    def _pieces(self, blocks: Sequence[BlockId], rows: Bytes, shard: int) -> npt.NDArray[np.int64]:
        """One piece for each block, layer and field."""
        begins = np.zeros((len(blocks), 1, 5), np.int64)
        begins[:, 0, 0] = self._pool.data_ptr()
        begins[:, 0, 0] += np.asarray(blocks, np.int64) * self._pool.shape[1]
        begins[:, 0, 1] = rows.ctypes.data + np.arange(len(blocks)) * rows.strides[0]
        begins[:, 0, 2] = begins[:, 0, 1]
        return (begins + self._of_a_block[shard]).reshape(-1, 5)

    def _pieces_of_a_block(self, shard: int) -> npt.NDArray[np.int64]:
        """Those of a block at address 0, whose codes are at address 0, too."""
        layers = np.arange(self._layers)
        pieces = np.empty((self._layers, len(self._parts), 5), np.int64)
        for index, part in enumerate(self._parts):
            numbers = part.numbers + shard * part.shard_bytes
            pieces[:, index, 0] = layers * self._layer_bytes + numbers
            pieces[:, index, 1] = layers * self._coded_bytes + part.codes
            pieces[:, index, 2] = layers * self._coded_bytes + part.exponents
            pieces[:, index, 3:] = part.rows, part.field.size
        return pieces.reshape(-1, 5)

    def gather(self, chosen: torch.Tensor, shard: int) -> torch.Tensor:
        """One head shard of some blocks, encoded: bytes [blocks, bytes]."""
        raw = self._shards.gather(chosen, shard)
        layers = self._in_layers(raw, self._layer_bytes // self._kv_shards)
        found, begin = [], 0
        for part in self._parts:
            field = layers[:, :, begin : begin + part.shard_bytes].contiguous()
            numbers = field.view(self._numbers)
            shape = *layers.shape[:2], part.rows, part.field.size
            for each in encoded(numbers.view(shape), torch.int8):
                found.append(each.flatten(2).view(torch.uint8))
            begin += part.shard_bytes
        return self._padded(torch.cat(found, 2).flatten(1), self._share)

    def scatter(self, moved: torch.Tensor, chosen: torch.Tensor, shard: int) -> None:
        """The reverse. Clears the blocks' unused bytes."""
        layers = self._in_layers(moved, self._coded_bytes).view(torch.int8)
        found = []
        for part in self._parts:
            ends = part.exponents
            codes = layers[:, :, part.codes : ends]
            codes = codes.reshape(*layers.shape[:2], part.rows, part.field.size)
            exponents = layers[:, :, ends : ends + part.rows, None]
            numbers = decoded(codes, exponents, self._numbers)
            found.append(numbers.flatten(2).view(torch.uint8))
        raw = self._padded(torch.cat(found, 2).flatten(1), self._width)
        self._shards.scatter(raw, chosen, shard)

    def _in_layers(self, rows: torch.Tensor, layer_bytes: int) -> torch.Tensor:
        """The part of each layer that the group has: [blocks, L, bytes]."""
        return rows[:, : self._layers * layer_bytes].reshape(len(rows), self._layers, layer_bytes)

    def _padded(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
