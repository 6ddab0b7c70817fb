"""Steps under way: what was launched, and what must stay as it is until it was read.

In: scheduled pieces and a Runner. Out: steps with their results, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field

from baton_engine.interface import EngineInfo, Launched, Row, RowResult, Runner
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.model_input import make_rows
from baton_engine.scheduling.scheduler import Piece, Scheduler
from baton_engine.scheduling.sequence import Sequence
from baton_protocol.ids import BlockId


@dataclass(slots=True)
class InFlightStep:
    """Step `number`, and the rows of its pieces. Blocks in `held` belong to sequences that ended
    while it was under way: it may still write them."""

    number: int
    pieces: Seq[Piece]
    rows: Seq[Row]
    launched: Launched
    held: list[list[BlockId]] = field(default_factory=list)


class InFlightSteps:
    """Launched and not read: two steps at most, and one while sequences end."""

    def __init__(
        self, info: EngineInfo, runner: Runner, pool: BlockPool, scheduler: Scheduler
    ) -> None:
        self._info = info
        self._runner = runner
        self._pool = pool
        self._scheduler = scheduler
        self._under_way: list[InFlightStep] = []  # the oldest in front
        self._launches = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def launch(self) -> None:
        """Schedule a step behind those under way, and launch it unless nothing can run. Where that
        raises, it is as if it had not been tried."""
        pieces = self._scheduler.schedule(ahead=bool(self._under_way))
        self._pool.host.move()
        if not pieces:
            return
        number = self._launches + 1
        rows = make_rows(pieces, self._info, number)
        try:
            launched = self._runner.launch(rows)
        except BaseException:
            for piece, row in zip(pieces, rows, strict=True):
                after = -1 if row.after is None else row.after
                self._scheduler.rewind(piece.sequence, row.start, after, self._launches)
            raise
        self._under_way.append(InFlightStep(number, pieces, rows, launched))
        self._launches = number

    def read(self) -> tuple[InFlightStep, list[RowResult]]:
        """The oldest step, which is under way no longer. Where that raises, nothing is."""
        try:
            results = self._under_way[0].launched.read()
        except BaseException:
            self._forget()
            raise
        return self._land(), results

    def _forget(self) -> None:
        """The oldest step could not be read, so that the next has no meaning either: wait until it
        is done with its blocks, and begin again from what was read."""
        for step in self._under_way[1:]:
            with suppress(Exception):
                step.launched.read()
        while self._under_way:
            step = self._land()
            for piece in step.pieces:
                sequence = piece.sequence
                self._scheduler.rewind(sequence, sequence.computed, -1, step.number)

    def _land(self) -> InFlightStep:
        """The oldest step is done with its blocks."""
        step = self._under_way.pop(0)
        for blocks in step.held:
            self._pool.release(blocks)
        return step

    def release(self, sequence: Sequence, blocks: list[BlockId]) -> bool:
        """Release the blocks of a sequence that has ended as soon as no step uses them. False where
        none does: they are still the caller's."""
        if not self._under_way or self._under_way[-1].number != sequence.step:
            return False
        self._under_way[-1].held.append(blocks)
        return True

    def blocks(self) -> Iterator[BlockId]:
        """All that are held for steps under way, each as often as it is."""
        for step in self._under_way:
            for blocks in step.held:
                yield from blocks
