"""Engines for tests of landed KV (blocks whose bytes arrived from elsewhere): a pool filled with
poison, a runner that checks its rows, bytes from another engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import KVMemory, Launched, Reservation, Row, RowResult
from baton_engine.kv.block_pool import hash_in
from baton_engine.kv.host_blocks import CopiedBlocks, slots_for
from baton_engine.sim.build import SimSettings, build_sim
from baton_engine.speculation.drafter import Drafter
from baton_protocol.ids import BlockId
from baton_protocol.layout import KVGroup

BLOCK = 4
# Groups of layers: one without a window, one with a window, one of each, and several windows.
GROUPS: list[tuple[KVGroup, ...]] = [
    (),
    (KVGroup((0,), 6),),
    (KVGroup((0,)), KVGroup((1,), 6)),
    (KVGroup((0,)), KVGroup((1,), 3), KVGroup((2,), 9)),
]
POISON = 0xA5


def sim(**changes: Any) -> EngineCore:
    """A sim engine with 400 blocks of 4 tokens (128 bytes), chunks of 2 blocks, a context of 40
    tokens and no host tier. Each group has one layer. The machine's memory is not looked up, which
    takes as long as all else."""
    sizes = {"num_blocks": 400, "max_model_len": 40, "block_size": BLOCK} | changes
    sizes.setdefault("overcommit", True)
    layers = len(changes.get("groups", ())) or 1
    return build_sim(SimSettings(layers=layers, kv_heads=1, head_dim=4, chunk_blocks=2, **sizes))


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
    - a row may wait only for its own next token;
    - a row has a block for each token that it computes, and for each that these tokens see.

    Copies of the host tier are made as late as their contract allows (see LateCopies).

    `fails` names the operation that fails next, once: "launch" or "read".
    """

    def __init__(self, engine: EngineCore, host_slots: int = 0) -> None:
        self._runner = engine.runner
        self.host = LateCopies(engine.memory, host_slots)
        self._layout = engine.info.layout
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
        copy = self.memory.copy

        def copied(sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
            self.host.make()
            copy(sources, targets)

        self.memory.copy = copied  # type: ignore[method-assign]

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
            assert self.unread or row.awaited_sample is None, (
                "a row awaits a token, but no step is unread"
            )
        self.fail("launch")
        self.host.make()
        self.steps.append([(row.start, len(row.tokens)) for row in rows])
        used = [self.used(row) for row in rows]
        self.unread.append(WatchedStep(self, rows, used, self._runner.launch(rows)))
        return self.unread[-1]

    def written(self, row: Row) -> Sequence[BlockId]:
        size, groups = self._layout.block_size, self._layout.num_groups
        end = row.start + len(row.tokens)
        return row.blocks[row.start // size * groups : -(-end // size) * groups]

    def used(self, row: Row) -> tuple[BlockId, ...]:
        """The row's blocks; 0 in place of those that its first token does not see."""
        size, groups = self._layout.block_size, self._layout.num_groups
        first = self._layout.window_start(row.start) // size
        end = -(-(row.start + len(row.tokens)) // size)
        used = list(row.blocks)
        for index, block in enumerate(used):
            if index < first * groups and index % groups >= self._layout.num_full_groups:
                used[index] = BlockId(0)
            elif index < end * groups:
                assert block, f"block {index} of {row.blocks} is missing, and is seen"
        return tuple(used)

    def check_read(self, step: WatchedStep) -> None:
        assert self.unread.pop(0) is step, "steps are read in order, once each"
        for row, used in zip(step.rows, step.used, strict=True):
            for block in filter(None, used):
                assert self._pool.refs(block), f"block {block} was free before its step was read"
            for block in self.written(row):
                assert self._pool.hash_of(block) is None, f"block {block} was registered too early"


class LateCopies(CopiedBlocks):
    """A HostMemory whose copies are made only before the work of the next step, or by settle().
    `settled` says whether settle() was called since the last copy."""

    settled = True

    def __init__(self, memory: KVMemory, num_slots: int) -> None:
        super().__init__(memory, num_slots)
        self._late: list[Callable[[], None]] = []

    def save(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        self.settled = False
        self._late.append(partial(super().save, blocks, slots))

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId]) -> None:
        self.settled = False
        self._late.append(partial(super().load, slots, blocks))

    def settle(self) -> None:
        self.make()
        self.settled = True

    def make(self) -> None:
        for copy in self._late:
            copy()
        self._late.clear()


@dataclass(frozen=True)
class WatchedStep:
    """A launched step. `used` are the rows' blocks at launch (see WatchedRunner.used). Rows of the
    same sequence share one list of blocks."""

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
                same = (
                    not then or now in (0, then)
                    for now, then in zip(row.blocks, used, strict=False)
                )
                assert all(same), "blocks of a row in use were replaced"
                continue
            assert own_row.blocks_id != row.blocks_id, "two sequences have one key"
            assert set(used).isdisjoint(written), "a block that is being read is written"
            being_written = self.runner.written(own_row)
            assert set(self.runner.used(row)).isdisjoint(being_written), (
                "a block that is being written is read"
            )
        if row.awaited_sample is not None:
            own_row, sample = [
                (own_row, each) for own_row in self.rows for each in own_row.samples
            ][row.awaited_sample]
            assert own_row.blocks is row.blocks, "a row awaits the token of another sequence"
            assert sample.position == row.start + len(row.tokens) - 1


def watched_sim(drafter: Drafter | None = None, **changes: Any) -> tuple[EngineCore, WatchedRunner]:
    """A sim engine whose pool is filled with poison."""
    plain = sim(**changes)
    slots = slots_for(changes.get("host_kv_memory", 0), plain.info.layout)
    runner = WatchedRunner(plain, slots)
    host = runner.host if slots else None
    engine = EngineCore(
        *(plain.info, runner, host),
        overlap=plain.overlap,
        drafter=drafter,
        scheduling=plain.scheduling,
    )
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


class Landing(NamedTuple):
    """See EngineCore.submit."""

    landed: list[tuple[int, int]]
    window_landed: list[tuple[int, int]]


def land(
    engine: EngineCore,
    reservation: Reservation,
    donor: EngineCore,
    wanted: Iterable[int],
    windowed: Iterable[int] | None = None,
) -> Landing:
    """Copy the wanted spans that the donor has and the reservation lacks, and poison the others. In
    the groups with a window, copy only the spans in `windowed`, if it is given."""
    groups, full = engine.info.layout.num_groups, engine.info.layout.num_full_groups
    reserved = [block for block in reservation.blocks[reservation.cached * groups :] if block]
    poison(engine, reserved)
    landed: tuple[list[int], list[int]] = ([], [])
    asked = set(wanted), set(wanted) & set(wanted if windowed is None else windowed)
    for span in range(reservation.cached, len(reservation.hashes)):
        for found, spans, members in zip(
            landed, asked, (range(full), range(full, groups)), strict=True
        ):
            hash = reservation.hashes[span]
            sources = [donor._pool.lookup([hash_in(group, hash)]) for group in members]
            if span in spans and all(sources):
                found.append(span)
                for group, source in zip(members, sources, strict=True):
                    block = reservation.blocks[span * groups + group]
                    engine.memory.write([block], memoryview(content(donor, source)))
    return Landing(runs_of(landed[0]), runs_of(landed[1]))


def runs_of(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as runs [start, end)."""
    starts = [each for each in indices if each - 1 not in indices]
    ends = [each + 1 for each in indices if each + 1 not in indices]
    return list(zip(starts, ends, strict=True))
