"""The paged KV pool as bytes, for transfers, and as typed tensors, for attention.

In: layout and block count. Out: `pool`, the blocks as bytes [P, Z]; `fields`, for each field of the
layout a typed view [P, L, K, B, H] of the same memory; and KVMemory's read, write and views for
transfers. On a CPU sockets can read and write the memory directly. On CUDA, each transfer thread
copies bytes through its own pinned staging buffer on its own stream.

Head shard s of a block has rows [s * K / S, (s + 1) * K / S) of each field in each layer: one
contiguous piece of the block per layer and field.

Shapes: P blocks with block 0 (padding), Z bytes of a block, L layers of a group (see
KVLayout.group_layers), K heads of a field, S head shards, B block size, H numbers of a field's row,
F fields of the same size, one after the other.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.errors import SettingsError
from baton_engine.kv.staging import stage
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVField, KVLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}
# Types to copy bytes with; the widest is the fastest.
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
STAGING_BYTES = 8 << 20

Bytes = npt.NDArray[np.uint8]


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
        self.fields: Mapping[str, torch.Tensor] = field_views(self.pool, layout)
        shards = layout.kv_shards
        # Fields of the same size are copied as one.
        runs = [list(run) for _, run in groupby(layout.kv_fields, key=_token_bytes)]
        sizes = [layout.block_size * _token_bytes(run[0]) for run in runs]  # of a layer's field
        pieces = [size // shards for size in sizes]
        word = next(word for word in WORDS if math.gcd(*pieces) % word.itemsize == 0)
        self._words = self.pool.view(word)
        self._runs = []  # [P, L, F, S, bytes of a piece, or its words on CUDA]
        layers_PLZ = self.pool.view(shape[0], layout.group_layers, -1)
        begin = 0
        for run, size, piece in zip(runs, sizes, pieces, strict=True):
            end = begin + len(run) * size
            run_PLFS = layers_PLZ[:, :, begin:end].view(
                *layers_PLZ.shape[:2], len(run), shards, piece
            )
            self._runs.append(run_PLFS if self._bytes is not None else run_PLFS.view(word))
            begin = end
        self._share = layout.block_bytes // shards
        self._local = threading.local()

    def read(self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0) -> None:
        target = self._rows(into, len(blocks))
        if self._bytes is not None:
            for parts, pieces in self._pieces(target, shard):
                for index, block in enumerate(blocks):
                    np.copyto(parts[index], pieces[block])  # releases the GIL
            return
        stream, staging = self._staging()
        with torch.cuda.stream(stream):
            for begin, end in self._portions(len(blocks), staging):
                chosen = torch.tensor(blocks[begin:end], device=self.pool.device)
                part = staging[: end - begin]
                part.copy_(self._gather(chosen, shard), non_blocking=True)
                stream.synchronize()
                np.copyto(target[begin:end], part.numpy())

    def write(self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0) -> None:
        source = self._rows(data, len(blocks))
        if self._bytes is not None:
            for parts, pieces in self._pieces(source, shard):
                for index, block in enumerate(blocks):
                    np.copyto(pieces[block], parts[index])
            return
        stream, staging = self._staging()
        with torch.cuda.stream(stream):
            for begin, end in self._portions(len(blocks), staging):
                part = staging[: end - begin]
                np.copyto(part.numpy(), source[begin:end])
                chosen = torch.tensor(blocks[begin:end], device=self.pool.device)
                self._scatter(part.to(self.pool.device, non_blocking=True), chosen, shard)
                stream.synchronize()  # the next portion reuses the staging, and steps may read

    def views(self, blocks: Sequence[BlockId]) -> list[memoryview] | None:
        if self._bytes is None or self.layout.kv_shards != 1:
            return None
        return [memoryview(self._bytes[block]) for block in blocks]

    def _rows(self, data: memoryview, count: int) -> Bytes:
        """View a transfer's buffer as [count, bytes of one block's shard]."""
        return np.frombuffer(data, np.uint8).reshape(count, self._share)

    def _pieces(self, rows: Bytes, shard: int) -> list[tuple[Bytes, Bytes]]:
        """For each run of fields, the transfer's bytes [blocks, L, F, bytes] and the pool's
        [P, L, F, bytes]."""
        layers, begin, found = rows.reshape(len(rows), self.layout.group_layers, -1), 0, []
        for run in self._runs:
            fields, size = run.shape[2], run.shape[4]
            end = begin + fields * size
            parts = layers[:, :, begin:end].reshape(*layers.shape[:2], fields, size)
            found.append((parts, run[:, :, :, shard].numpy()))
            begin = end
        return found

    def _gather(self, chosen: torch.Tensor, shard: int) -> torch.Tensor:
        """One head shard of some blocks on the device, as bytes [blocks, bytes]."""
        layers = [
            run[:, :, :, shard].index_select(0, chosen).flatten(2).view(torch.uint8)
            for run in self._runs
        ]
        return (layers[0] if len(layers) == 1 else torch.cat(layers, 2)).flatten(1)

    def _scatter(self, moved: torch.Tensor, chosen: torch.Tensor, shard: int) -> None:
        """The reverse: write the bytes [blocks, bytes] of one head shard."""
        layers, begin = moved.view(len(moved), self.layout.group_layers, -1), 0
        for run in self._runs:
            part = run[:, :, :, shard]
            end = begin + part.shape[2] * part.shape[3] * part.element_size()
            source = layers[:, :, begin:end].contiguous().view(part.dtype)
            part.index_copy_(0, chosen, source.view(len(moved), *part.shape[1:]))
            begin = end

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


def field_views(pool_PZ: torch.Tensor, layout: KVLayout) -> dict[str, torch.Tensor]:
    """The typed view [P, L, K, B, H] of each field in blocks of bytes. Raises SettingsError if a
    field does not begin at a multiple of its number's size."""
    views, begin, size = {}, 0, layout.block_size
    for field in layout.kv_fields:
        dtype = TORCH_DTYPES[field.dtype]
        item = dtype.itemsize
        if begin % item or layout.layer_bytes % item or layout.block_bytes % item:
            raise SettingsError(
                f"{field.name} begins at byte {begin} of {layout.layer_bytes} of a layer, which "
                f"does not fit {field.dtype}; use another --block-size"
            )
        rows = size * field.size
        views[field.name] = pool_PZ.view(dtype).as_strided(
            (len(pool_PZ), layout.group_layers, field.heads, size, field.size),
            (layout.block_bytes // item, layout.layer_bytes // item, rows, field.size, 1),
            begin // item,
        )
        begin += size * field.token_bytes
    return views


def _token_bytes(field: KVField) -> int:
    return field.token_bytes
