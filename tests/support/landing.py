"""Engines for tests of landed KV: a pool full of poison, a runner that is watched, bytes that come
from another engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from baton_engine.api import KVMemory, Launched, Reservation, Row
from baton_engine.core import EngineCore
from baton_engine.host_tier import CopiedBlocks, slots_for
from baton_engine.sim import SimSettings, build_sim
from baton_protocol.ids import BlockId
from baton_protocol.request import Request

BLOCK = 4
POISON = 0xA5


def sim(**changes: Any) -> EngineCore:
    """A sim with blocks of 4 tokens (128 bytes) and chunks of 2 blocks; 400 of them, 40 tokens at
    most, and no host tier."""
    sizes = {"num_blocks": 400, "max_model_len": 40, "block_size": BLOCK} | changes
    return build_sim(SimSettings(layers=1, kv_heads=1, head_dim=4, chunk_blocks=2, **sizes))


def host_bytes(slots: int) -> int:
    """--host-kv-memory for so many blocks of sim()."""
    return slots * 2 * BLOCK * 4 * 4


class WatchedRunner:
    """Runs the rows of another runner. Fails where one writes into a block that others may read:
    one that is in the prefix cache (whatever landed is), or has another holder."""

    def __init__(self, engine: EngineCore) -> None:
        self._runner = engine.runner
        self._size = engine.info.layout.block_size
        self.watched: EngineCore
        self.steps: list[list[tuple[int, int]]] = []  # (start, tokens) of each row

    @property
    def memory(self) -> KVMemory:
        return self._runner.memory

    def launch(self, rows: Sequence[Row]) -> Launched:
        pool = self.watched._pool
        for row in rows:
            end = row.start + len(row.tokens)
            for block in row.blocks[row.start // self._size : -(-end // self._size)]:
                assert pool.hash_of(block) is None, f"block {block} is cached, and is written"
                assert pool.refs(block) == 1, f"block {block} is shared, and is written"
        self.steps.append([(row.start, len(row.tokens)) for row in rows])
        return self._runner.launch(rows)


def watched_sim(**changes: Any) -> tuple[EngineCore, WatchedRunner]:
    """A sim whose whole pool is poison."""
    plain = sim(**changes)
    runner = WatchedRunner(plain)
    slots = slots_for(changes.get("host_kv_memory", 0), plain.info.layout)
    host = CopiedBlocks(runner.memory, slots) if slots else None
    engine = runner.watched = EngineCore(plain.info, runner, host)
    poison(engine, map(BlockId, range(1, engine.info.num_blocks + 1)))
    return engine, runner


def poison(engine: EngineCore, blocks: Iterable[BlockId]) -> None:
    data = memoryview(bytes([POISON]) * engine.info.layout.block_bytes)
    for block in blocks:
        engine.memory.write([block], data)


def content(engine: EngineCore, blocks: Sequence[BlockId]) -> bytes:
    data = bytearray(engine.info.layout.block_bytes * len(blocks))
    engine.memory.read(blocks, memoryview(data))
    return bytes(data)


def land(
    engine: EngineCore,
    reservation: Reservation,
    donor: EngineCore,
    request: Request,
    wanted: Iterable[int],
) -> list[tuple[int, int]]:
    """Copy those of the wanted blocks that the donor has and the reservation lacks; poison the
    others. Return the runs that have landed."""
    source = donor.reserve(request)
    assert source is not None
    able = range(reservation.cached, min(source.cached, len(reservation.hashes)))
    landed = sorted(set(wanted) & set(able))
    poison(engine, reservation.blocks[reservation.cached :])
    for index in landed:
        data = memoryview(content(donor, source.blocks[index : index + 1]))
        engine.memory.write(reservation.blocks[index : index + 1], data)
    donor.release(source)
    return runs_of(landed)


def runs_of(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as runs [start, end)."""
    starts = [each for each in indices if each - 1 not in indices]
    ends = [each + 1 for each in indices if each + 1 not in indices]
    return list(zip(starts, ends, strict=True))
