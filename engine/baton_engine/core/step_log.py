"""--log-steps: one line on stderr for each step, with what it scheduled, why, and its time.

In: the scheduler after it chose a step, and the step after it was read. Out: lines for readers, or
JSON lines with the same facts. A step's time begins when it is scheduled, or when the step before
is read if that is later, so the times of overlapping steps add up to the run's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from baton_engine.config.engine_config import LogSteps
from baton_engine.interface import Drafts, Row, StepResult
from baton_engine.scheduling.scheduler import Piece, Scheduler
from baton_protocol.store import NodeLoad

Clock = Callable[[], float]
Write = Callable[[str], None]
# decode: the next token, maybe with drafts after it. prompt: a piece of the prompt. again: tokens
# that were known before, of a sequence that was preempted or that came with outputs.
Why = Literal["decode", "prompt", "again"]
# blocks: too few are free. behind: an older sequence lacks blocks. preemption: a step that preempts
# admits none. max-num-seqs, max-batched-tokens: the step has as many already.
Wait = Literal["blocks", "behind", "preemption", "max-num-seqs", "max-batched-tokens"]
MOST_NAMED = 32  # waiting sequences in one line


class Scheduled(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence of a step: `tokens` computed from position `start` on. `prompt` is the prompt's
    length, for a piece of it; `drafts` of the tokens were drafts, and `accepted` were right."""

    request: str
    choice: int
    why: Why
    start: int
    tokens: int
    prompt: int = 0
    drafts: int = 0
    accepted: int = 0


class Waiting(msgspec.Struct, frozen=True):
    request: str
    choice: int
    why: Wait


class StepLine(msgspec.Struct, frozen=True):
    """One step. `waiting` names the oldest of `num_waiting` sequences."""

    step: int
    ms: float
    tokens: int
    scheduled: Seq[Scheduled]
    preempted: Seq[str]
    num_waiting: int
    waiting: Seq[Waiting]
    free_blocks: int
    total_blocks: int
    process: int

    def text(self) -> str:
        parts = [", ".join(map(_scheduled_text, self.scheduled))]
        if self.preempted:
            parts.append(f"preempted {', '.join(self.preempted)}")
        if self.num_waiting:
            named = ", ".join(f"{_name(each)} ({each.why})" for each in self.waiting)
            more = self.num_waiting - len(self.waiting)
            parts.append(f"waiting {named}" + (f" and {more} more" if more else ""))
        return (
            f"step {self.step} of {self.process}: {self.ms:.2f} ms, {self.tokens} tokens of"
            f" {len(self.scheduled)} sequences, {self.free_blocks}/{self.total_blocks} blocks free;"
            f" {'; '.join(parts)}"
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is known when a step is scheduled and may have changed when it is read."""

    began: float
    preempted: Seq[str]
    num_waiting: int
    waiting: Seq[Waiting]


class StepLog:
    """Writes a line per step. `clock` is in seconds."""

    def __init__(
        self,
        form: Literal["text", "json"],
        *,
        clock: Clock = time.perf_counter,
        write: Write | None = None,
    ) -> None:
        self._form = form
        self.clock = clock
        self._write = _to_stderr if write is None else write
        self._read_at = 0.0

    @classmethod
    def of(cls, form: LogSteps) -> StepLog | None:
        """The log that the option asks for."""
        return None if form == "off" else cls(form)

    def schedule(self, scheduler: Scheduler, began: float) -> Schedule:
        """`scheduler` has just chosen the pieces of a step. It began at `began`."""
        waiting = islice(enumerate(scheduler.waiting), MOST_NAMED)
        return Schedule(
            began,
            [str(each.state.request.id) for each in scheduler.preempted],
            len(scheduler.waiting),
            [
                Waiting(str(each.state.request.id), each.choice, _why(scheduler, place))
                for place, each in waiting
            ],
        )

    def step(
        self,
        number: int,
        rows: Seq[tuple[Piece, Row]],
        schedule: Schedule,
        result: StepResult,
        load: NodeLoad,
    ) -> None:
        """A step is read, and its results are applied."""
        now = self.clock()
        seconds = now - max(schedule.began, self._read_at)
        self._read_at = now
        drafts = iter(result.drafts)
        line = StepLine(
            step=number,
            ms=round(1e3 * seconds, 3),
            tokens=sum(piece.count for piece, _ in rows),
            scheduled=[
                _scheduled(piece, row, next(drafts, None) if piece.drafts else None)
                for piece, row in rows
            ],
            preempted=schedule.preempted,
            num_waiting=schedule.num_waiting,
            waiting=schedule.waiting,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            process=os.getpid(),
        )
        text = json.dumps(msgspec.to_builtins(line)) if self._form == "json" else line.text()
        self._write(text + "\n")


def _why(scheduler: Scheduler, place: int) -> Wait:
    if scheduler.preempted:
        return "preemption"
    if scheduler.owes_blocks:
        return "behind" if place else "blocks"
    if len(scheduler.running) >= scheduler.limits.seqs:
        return "max-num-seqs"
    return "max-batched-tokens"


def _scheduled(piece: Piece, row: Row, drafts: Drafts | None) -> Scheduled:
    state, start = piece.sequence.state, row.start
    prompt = state.prompt_len if start < state.prompt_len else 0
    why: Why = "prompt" if prompt else "again"
    if not prompt and piece.count == 1 + len(piece.drafts) and row.samples:
        why = "decode"
    return Scheduled(
        request=str(state.request.id),
        choice=piece.sequence.choice,
        why=why,
        start=start,
        tokens=piece.count,
        prompt=prompt,
        drafts=len(piece.drafts),
        accepted=0 if drafts is None else drafts.accepted,
    )


def _name(each: Scheduled | Waiting) -> str:
    return f"{each.request}.{each.choice}" if each.choice else each.request


def _scheduled_text(each: Scheduled) -> str:
    end = each.start + each.tokens
    if each.why == "prompt":
        return f"{_name(each)} prompt {each.start}-{end} of {each.prompt}"
    if each.why == "again":
        return f"{_name(each)} again {each.start}-{end}"
    drafts = f" with {each.drafts} drafts, {each.accepted} right" if each.drafts else ""
    return f"{_name(each)} decode {each.start}{drafts}"


def _to_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()
