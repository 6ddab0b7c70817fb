"""Engines for tests of landed KV (blocks whose bytes arrived from elsewhere): a pool filled with
poison, a runner that checks its rows, bytes from another engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import KVMemory, Launched, Reservation, Row, RowResult
from baton_engine.kv.cpu_offload import CopiedBlocks, slots_for
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.ids import BlockId
from baton_protocol.request import Request

BLOCK = 4
POISON = 0xA5


def sim(**changes: Any) -> EngineCore:
    """A sim engine with 400 blocks of 4 tokens (128 bytes), chunks of 2 blocks, a context of 40
    tokens and no host tier."""
    sizes = {"num_blocks": 400, "max_model_len": 40, "block_size": BLOCK} | changes
    return build_sim(SimSettings(layers=1, kv_heads=1, head_dim=4, chunk_blocks=2, **sizes))


def host_bytes(slots: int) -> int:
    """The bytes of --host-kv-memory for `slots` blocks of sim()."""
    return slots * 2 * BLOCK * 4 * 4


class DeviceLostError(Exception):
    """The scripted failure of a WatchedRunner."""


class WatchedRunner:
    """Wraps an engine's runner, and raises AssertionError for a row that breaks a rule:

    - no write to a block that others may read: one in the prefix cache (which includes landed
      blocks), or one with another holder;
    - no block of an unread step may be allocated, registered or used by another sequence;
    - a row may wait only for its own next token.

    `fails` names the operation that fails next, once: "launch" or "read".
    """

    def __init__(self, engine: EngineCore) -> None:
        self._runner = engine.runner
        self._size = engine.info.layout.block_size
        self._pool = engine._pool
        self.unread: list[WatchedStep] = []
        self.fails = ""
        self.steps: list[list[tuple[int, int]]] = []  # (start, tokens) of each row

    def watch(self, engine: EngineCore) -> None:
        """Attach the runner to its engine, and check the block allocations of its pool."""
        self._pool = pool = engine._pool
        allocate = pool.allocate

        def watched(count: int) -> list[BlockId]:
            taken = allocate(count)
            for step in self.unread:
                assert not step.uses(taken), f"some of {taken} are used by an unread step"
            return taken

        pool.allocate = watched  # type: ignore[method-assign]

    @property
    def memory(self) -> KVMemory:
        return self._runner.memory

    def fail(self, now: str) -> None:
        if self.fails == now:
            self.fails = ""
            raise DeviceLostError(now)

    def launch(self, rows: Sequence[Row]) -> WatchedStep:
        assert len(self.unread) < 2, "two steps are in flight"
        for row in rows:
            for block in self.written(row):
                assert self._pool.hash_of(block) is None, f"block {block} is cached, and is written"
                assert self._pool.refs(block) == 1, f"block {block} is shared, and is written"
            for step in self.unread:
                step.check_next(row, self.written(row))
            assert self.unread or row.after is None, "a row awaits a token, but no step is unread"
        self.fail("launch")
        self.steps.append([(row.start, len(row.tokens)) for row in rows])
        used = [tuple(row.blocks) for row in rows]
        self.unread.append(WatchedStep(self, rows, used, self._runner.launch(rows)))
        return self.unread[-1]

    def written(self, row: Row) -> Sequence[BlockId]:
        end = row.start + len(row.tokens)
        return row.blocks[row.start // self._size : -(-end // self._size)]

    def check_read(self, step: WatchedStep) -> None:
        assert self.unread.pop(0) is step, "steps are read in order, once each"
        for row, used in zip(step.rows, step.used, strict=True):
            for block in used:
                assert self._pool.refs(block), f"block {block} was free before its step was read"
            for block in self.written(row):
                assert self._pool.hash_of(block) is None, f"block {block} was registered too early"


@dataclass(frozen=True)
class WatchedStep:
    """A launched step. `used` are copies of the rows' blocks at launch. Rows of the same sequence
    share one list of blocks."""

    runner: WatchedRunner
    rows: Sequence[Row]
    used: Sequence[tuple[BlockId, ...]]
    launched: Launched

    def read(self) -> list[RowResult]:
        self.runner.check_read(self)
        results = self.launched.read()
        self.runner.fail("read")
        return results

    def uses(self, blocks: Iterable[BlockId]) -> bool:
        return any(not set(used).isdisjoint(blocks) for used in self.used)

    def check_next(self, row: Row, written: Sequence[BlockId]) -> None:
        """Check a row of the next step against this unread one."""
        for own_row, used in zip(self.rows, self.used, strict=True):
            if own_row.blocks is row.blocks:
                assert tuple(row.blocks[: len(used)]) == used, (
                    "blocks were removed from a row in use"
                )
                continue
            assert own_row.key != row.key, "two sequences have one key"
            assert set(used).isdisjoint(written), "a block that is being read is written"
            being_written = self.runner.written(own_row)
            assert set(row.blocks).isdisjoint(being_written), (
                "a block that is being written is read"
            )
        if row.after is not None:
            own_row, sample = [
                (own_row, each) for own_row in self.rows for each in own_row.samples
            ][row.after]
            assert own_row.blocks is row.blocks, "a row awaits the token of another sequence"
            assert sample.position == row.start + len(row.tokens) - 1


def watched_sim(**changes: Any) -> tuple[EngineCore, WatchedRunner]:
    """A sim engine whose pool is filled with poison."""
    plain = sim(**changes)
    runner = WatchedRunner(plain)
    slots = slots_for(changes.get("host_kv_memory", 0), plain.info.layout)
    host = CopiedBlocks(runner.memory, slots) if slots else None
    engine = EngineCore(plain.info, runner, host, overlap=plain.overlap)
    runner.watch(engine)
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
    """Copy the wanted blocks that the donor has and the reservation lacks, and poison the others.
    Return the runs [start, end) of block indices that landed."""
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
