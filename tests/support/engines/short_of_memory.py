"""Simulated engines on a device that lacks memory for some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import OutOfMemory
from baton_engine.interface import KVMemory, Launched, Row, Runner
from baton_engine.sim.build import SimSettings, build_sim


class ShortOfMemory:
    """Wraps a runner. A launch raises OutOfMemory if `lacks` says so for its number (from 0) and
    its rows; a failed launch has a number, too."""

    def __init__(self, runner: Runner, lacks: Callable[[int, Sequence[Row]], bool]) -> None:
        self._runner = runner
        self._lacks = lacks
        self.launches = 0
        self.failed: list[Sequence[Row]] = []
        self.fitted: list[tuple[int, int]] = []  # (tokens, rows)

    @property
    def memory(self) -> KVMemory:
        return self._runner.memory

    def launch(self, rows: Sequence[Row]) -> Launched:
        number, self.launches = self.launches, self.launches + 1
        if self._lacks(number, rows):
            self.failed.append(rows)
            raise OutOfMemory("out of memory")
        self.fitted.append((tokens_of(rows), len(rows)))
        return self._runner.launch(rows)


def tokens_of(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def samples_of(rows: Sequence[Row]) -> int:
    return sum(len(row.samples) for row in rows)


def engine_on(
    lacks: Callable[[int, Sequence[Row]], bool], **changes: Any
) -> tuple[EngineCore, ShortOfMemory]:
    """A simulated engine of 400 blocks of 4 tokens with steps of 32 tokens, which lacks memory for
    some of them."""
    sizes = {"num_blocks": 400, "max_model_len": 200, "max_batched_tokens": 32} | changes
    plain = build_sim(SimSettings(block_size=4, chunk_blocks=2, **sizes))
    runner = ShortOfMemory(plain.runner, lacks)
    return EngineCore(plain.info, runner, overlap=plain.overlap), runner
