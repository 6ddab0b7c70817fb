"""Runs one batch, from its checks to its end.

In: the order of a batch, its input, and a function that answers one line. Out: parts with answers
as they come, then the output and the error file, and the end. Whatever a router that died has left
in the store is where this one continues: lines with a stored answer are not run again, and each
line of the input has exactly one line in the files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_router.batches.files import Files, WrittenBytes
from baton_router.batches.journal import Journal, LineAnswer
from baton_router.batches.lines import InputCheck, RawLine, read_blocks, unanswered_line
from baton_router.batches.object_store import ObjectStoreFailed
from baton_router.batches.records import (
    BatchEnd,
    BatchError,
    BatchOrder,
    EndStatus,
    FileObject,
    RequestCounts,
)

_NAMES = ("output", "error")
LOOK_S = 0.02  # between two looks for room
CHECK_S = 1.0  # between two checks for a cancellation; answers are kept as often
MOST_KEPT = 4 << 20  # bytes of answers in memory, beside those that are being computed
INPUT_GONE = "input_file_gone"
UNANSWERED = {
    "expired": ("batch_expired", "the batch expired before this request could run"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request could run"),
}


class LineRunner(Protocol):
    """Answers lines of batches; see `http/batch_lines`."""

    @property
    def stopping(self) -> bool:
        """Whether no more lines may start, because the router ends."""
        ...

    def has_room(self) -> bool:
        """Whether a line may start now."""
        ...

    async def answer(self, order: BatchOrder, line: RawLine) -> LineAnswer | None:
        """The answer to one line, or the error that it got. None: the router ends."""
        ...


class InputGone(Exception):
    """The input was deleted, or has expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWorkshop:
    """What every batch is run with. `now` returns Unix seconds. `ended` receives how one ended."""

    files: Files
    journal: Journal
    lines: LineRunner
    longest_line: int
    most_lines: int
    now: Callable[[], float]
    ended: Callable[[EndStatus], None]


class BatchRun:
    """One batch on this router. Cancel run() to leave the batch to another router."""

    def __init__(self, shop: BatchWorkshop, order: BatchOrder) -> None:
        self._shop = shop
        self._order = order
        self._running: dict[asyncio.Task[LineAnswer | None], int] = {}
        self._unsaved: list[LineAnswer] = []
        self._unsaved_bytes = 0
        self._left = False  # whether lines were left to another router

    async def run(self) -> None:
        """Run the batch until it has ended, or until the router stops."""
        shop, order = self._shop, self._order
        state = await shop.journal.read(order.tenant, order.id)
        if state is None:
            return
        if state.ending is not None:
            await shop.journal.close(order, state.ending, shop.files)
            return
        total = state.begun.total if state.begun is not None else 0
        try:
            if state.begun is None:
                check = InputCheck(order.endpoint, shop.most_lines)
                await check.check(self._blocks())
                total = check.total
                if check.errors:
                    await self._finish("failed", total, check.errors)
                    return
                await shop.journal.note(order, "begun", total)
            status = await self._answer_lines()
            if status is not None:
                await self._finish(status, total)
        except InputGone:
            message = f"the file {order.input_file_id} is gone; batches need it until they end"
            error = BatchError(code=INPUT_GONE, message=message, param="input_file_id", line=None)
            await self._finish("failed", total, [error])

    # --- answering --------------------------------------------------------------------------------

    async def _answer_lines(self) -> EndStatus | None:
        """Answer the lines that have no stored answer. Return how the batch ends; None if the
        router ends first."""
        journal, lines = self._shop.journal, self._shop.lines
        parts = await journal.parts(self._order)
        done = {answer.number async for answer in journal.answers(parts)}
        blocks = self._blocks()
        waiting: list[RawLine] = []  # of the current block, the next one last
        more, check_at = True, 0.0
        try:
            while more or waiting or self._running:
                if time.monotonic() >= check_at:
                    await self._save()
                    stopped = await self._stop_reason()
                    if stopped is not None:
                        return stopped
                    check_at = time.monotonic() + CHECK_S
                if more and not waiting:
                    block = await anext(blocks, None)
                    more = block is not None
                    waiting = [one for one in reversed(block or []) if one.number not in done]
                    continue
                while waiting and not lines.stopping and lines.has_room():
                    line = waiting.pop()
                    task = asyncio.create_task(lines.answer(self._order, line))
                    self._running[task] = line.number
                    await asyncio.sleep(0)
                if lines.stopping and not self._running:
                    return None
                await self._collect()
            return None if self._left else "completed"
        finally:
            await self._leave()

    async def _collect(self) -> None:
        """Wait for answers, for a moment."""
        if not self._running:
            await asyncio.sleep(LOOK_S)
            return
        ended, _ = await asyncio.wait(
            self._running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
        )
        self._take(ended)
        if self._unsaved_bytes > MOST_KEPT:
            await self._save()

    def _take(self, ended: set[asyncio.Task[LineAnswer | None]]) -> None:
        for task in ended:
            del self._running[task]
            answer = task.result()
            if answer is None:
                self._left = True
            else:
                self._unsaved.append(answer)
                self._unsaved_bytes += len(answer.json)

    async def _save(self) -> None:
        if self._unsaved:
            await self._shop.journal.keep_answers(self._order, self._unsaved)
            self._unsaved, self._unsaved_bytes = [], 0

    async def _leave(self) -> None:
        """End what runs, and keep the answers that are there."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._take({task for task in self._running if not (task.cancelled() or task.exception())})
        await self._save()

    async def _stop_reason(self) -> EndStatus | None:
        if await self._shop.journal.is_cancelled(self._order):
            return "cancelled"
        return "expired" if self._shop.now() >= self._order.expires_at else None

    # --- the end ----------------------------------------------------------------------------------

    async def _finish(
        self, status: EndStatus, total: int, errors: Sequence[BatchError] = ()
    ) -> None:
        """Write the files, and end the batch."""
        shop, order = self._shop, self._order
        if status != "failed":
            await shop.journal.note(order, "finishing")
        parts = await shop.journal.parts(order)
        succeeded, failed = 0, 0
        done: set[int] = set()
        async for answer in shop.journal.answers(parts):
            done.add(answer.number)
            succeeded += answer.succeeded
            failed += not answer.succeeded
        if status == "expired" and len(done) == total:
            status = "completed"
        if status == "completed" and len(done) < total:
            # Another router has ended the batch, and deleted its parts.
            raise ObjectStoreFailed(f"{order.id} has {len(done)} answers for {total} lines")
        unanswered = total - len(done)
        listed = unanswered if status in UNANSWERED else 0  # the input of a failed one is wrong
        written: list[WrittenBytes | None] = []
        try:
            for wanted, kind in ((succeeded, True), (failed + listed, False)):
                lines = self._lines(parts, kind, done, status)
                written.append(await shop.files.write(order.tenant, lines) if wanted else None)
            output, error = (
                self._describe(each, name) for each, name in zip(written, _NAMES, strict=True)
            )
            end = BatchEnd(
                status=status,
                at=int(shop.now()),
                counts=RequestCounts(total=total, completed=succeeded, failed=failed + unanswered),
                output=output,
                error=error,
                errors=tuple(errors),
            )
            ended = await shop.journal.end(order, end)
        except BaseException:
            await self._discard(written)
            raise
        if ended != end:  # another router was faster
            await self._discard(written)
        else:
            shop.ended(end.status)
        await shop.journal.close(order, ended, shop.files)

    async def _lines(
        self, parts: list[str], succeeded: bool, done: set[int], status: EndStatus
    ) -> AsyncIterator[bytes]:
        """The lines of the output, or of the error file."""
        async for answer in self._shop.journal.answers(parts):
            if answer.succeeded == succeeded:
                yield answer.json + b"\n"
        if succeeded or status not in UNANSWERED:
            return
        code, message = UNANSWERED[status]
        async for block in self._blocks():
            for line in block:
                if line.number not in done:
                    yield unanswered_line(self._order, line, code, message) + b"\n"

    def _describe(self, written: WrittenBytes | None, name: str) -> FileObject | None:
        if written is None:
            return None
        return self._shop.files.describe(
            written, f"{self._order.id}_{name}.jsonl", "batch_output", self._order.output_ttl_s
        )

    async def _discard(self, written: list[WrittenBytes | None]) -> None:
        for each in written:
            if each is not None:
                await self._shop.files.discard(self._order.tenant, each)

    def _blocks(self) -> AsyncIterator[list[RawLine]]:
        return read_blocks(self._read, self._order.input_bytes, self._shop.longest_line)

    async def _read(self, start: int, size: int) -> bytes:
        order = self._order
        data = await self._shop.files.read_range(order.tenant, order.input_file_id, start, size)
        if data is None:
            raise InputGone
        return data
