"""Steps in flight: launched and not yet read.

In: scheduled pieces and a Runner. Out: steps with their results, the oldest first. Blocks that a
step in flight may still write stay referenced until the step is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field

from baton_engine.core.step_log import Schedule, StepLog
from baton_engine.errors import OutOfMemory
from baton_engine.interface import EngineInfo, Launched, Row, RowResult, Runner
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.model_input import make_rows
from baton_engine.scheduling.scheduler import Piece, Scheduler
from baton_engine.scheduling.sequence import Sequence
from baton_protocol.ids import BlockId


@dataclass(slots=True)
class InFlightStep:
    """One launched step: its number (from 1), its pieces and one row per piece.

    `held` has the blocks of sequences that ended while the step was in flight. The step may still
    write those blocks. `schedule` is set if steps are logged.
    """

    number: int
    pieces: Seq[Piece]
    rows: Seq[Row]
    launched: Launched
    schedule: Schedule | None = None
    held: list[list[BlockId]] = field(default_factory=list)


class InFlightSteps:
    """The steps that are launched and not read: at most two while the next step is launched, and
    at most one between calls of EngineCore.step()."""

    def __init__(
        self,
        info: EngineInfo,
        runner: Runner,
        pool: BlockPool,
        scheduler: Scheduler,
        step_log: StepLog | None = None,
    ) -> None:
        self._info = info
        self._runner = runner
        self._pool = pool
        self._scheduler = scheduler
        self._step_log = step_log
        self._under_way: list[InFlightStep] = []  # oldest first
        self._launches = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def launch(self) -> int:
        """Schedule a step after those in flight and launch it, unless nothing can run. Returns 0,
        or the step's number of tokens if the device lacks memory for it. In this case, and if the
        runner raises another error, the sequences return to their state before the launch."""
        log = self._step_log
        began = log.clock() if log is not None else 0.0
        pieces = self._scheduler.schedule(ahead=bool(self._under_way))
        schedule = log.schedule(self._scheduler, began) if log is not None else None
        self._pool.host.move()
        if not pieces:
            return 0
        self._copy_tails()
        number = self._launches + 1
        rows = make_rows(pieces, self._info, number)
        try:
            launched = self._runner.launch(rows)
        except BaseException as error:
            for piece, row in zip(pieces, rows, strict=True):
                after = -1 if row.awaited_sample is None else row.awaited_sample
                self._scheduler.rewind(piece.sequence, row.start, after, self._launches)
            if not isinstance(error, OutOfMemory):
                raise
            return sum(piece.count for piece in pieces)
        self._under_way.append(InFlightStep(number, pieces, rows, launched, schedule))
        self._launches = number
        self._scheduler.limits.fit()
        return 0

    def _copy_tails(self) -> None:
        copies = self._scheduler.copies
        if not copies:
            return
        try:
            self._runner.memory.copy(
                [block for copy in copies for block in copy.sources],
                [block for copy in copies for block in copy.targets],
            )
        except BaseException:
            self._scheduler.drop_copies()
            raise
        copies.clear()

    def read(self) -> tuple[InFlightStep, list[RowResult]]:
        """Wait for the oldest step and return it with its results. If the runner raises, all steps
        in flight are dropped."""
        try:
            results = self._under_way[0].launched.read()
        except BaseException:
            self._forget()
            raise
        return self._land(), results

    def _forget(self) -> None:
        """Drop all steps in flight, because the oldest could not be read and the next depends on
        its tokens. Wait until the next no longer uses its blocks, then rewind every sequence to
        what it has computed."""
        for step in self._under_way[1:]:
            with suppress(Exception):
                step.launched.read()
        while self._under_way:
            step = self._land()
            for piece in step.pieces:
                sequence = piece.sequence
                self._scheduler.rewind(sequence, sequence.computed, -1, step.number)

    def _land(self) -> InFlightStep:
        """Remove the oldest step and release the blocks it held."""
        step = self._under_way.pop(0)
        for blocks in step.held:
            self._pool.release(blocks)
        return step

    def release(self, sequence: Sequence, blocks: list[BlockId]) -> bool:
        """Keep the blocks of an ended sequence until the newest step in flight is read, and return
        True. Return False if that step does not use the blocks: then the caller releases them."""
        if not self._under_way or self._under_way[-1].number != sequence.last_step:
            return False
        self._under_way[-1].held.append(blocks)
        return True

    def blocks(self) -> Iterator[BlockId]:
        """Blocks held for steps in flight, once per reference."""
        for step in self._under_way:
            for blocks in step.held:
                yield from blocks
