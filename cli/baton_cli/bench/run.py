"""Drives an engine through requests, and records when it computes which tokens.

In: an engine, requests, a clock. Out: a RunRecord. This module does only what must happen while the
clock runs; `metrics` computes the figures afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import StepResult
from baton_engine.memory.roofline import kv_read
from baton_protocol.ids import RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.request import Request

STEP_LIMIT = 10_000_000
# Sample the KV cache every 13 steps, because engine.load() walks over all requests: 0.2 ms for 256.
# A prime, so that samples do not always find requests of one length with equally full last blocks.
LOOK_EVERY = 13


@dataclass(slots=True)
class BenchRequest:
    """One request: the times of its tokens in seconds since the start and, until the first token,
    how many prompt tokens have KV (`computed`) in how many blocks."""

    prompt_len: int
    times: list[float] = field(default_factory=list)
    seen: int = -1  # the last step that computed something for it
    computed: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class BenchStep:
    """A step's end in seconds since the start, and the number of tokens it computed and sampled.
    `rows`: the sequences that got new tokens; `kv_bytes`: the KV that these rows read, each its
    own."""

    end: float
    prompt_tokens: int
    new_tokens: int
    rows: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheUse:
    """A sample of the KV cache in a step, in tokens: capacity that requests hold, and how much of
    it is empty. `steady`: the step computed no prompt tokens. `at`: its end, in seconds since the
    start."""

    allocated: int
    empty: int
    steady: bool
    at: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class RunRecord:
    """The record of a run. Times are seconds since the start. `cached_tokens` counts prompt tokens
    found in the prefix cache, `host_tokens` those loaded from the host tier."""

    lives: dict[RequestId, BenchRequest]
    steps: list[BenchStep] = field(default_factory=list)
    looks: list[CacheUse] = field(default_factory=list)
    cached_tokens: int = 0
    host_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    drafted_rows: int = 0  # sequences of steps that had drafts
    elapsed: float = 0.0

    @property
    def output_tokens(self) -> int:
        return sum(len(live.times) for live in self.lives.values())


def drive(
    engine: EngineCore,
    requests: Sequence[Request],
    *,
    clock: Callable[[], float],
    progress: Callable[[int], None] | None = None,
) -> RunRecord:
    """Submit all requests, then step until all have ended. The clock starts before the first
    submission. `progress` is called with the number of each step's new tokens."""
    before = engine.load().preemptions_total
    record = RunRecord({request.id: BenchRequest(len(request.prompt_ids)) for request in requests})
    began = clock()
    try:
        for request in requests:
            engine.submit(request, track=True)
        _step_all(engine, record, lambda: clock() - began, progress)
    finally:  # after an error, no request may keep running in the background
        for request in requests:
            engine.abort(request.id)
    record.preemptions = engine.load().preemptions_total - before
    return record


def _step_all(
    engine: EngineCore,
    record: RunRecord,
    now: Callable[[], float],
    progress: Callable[[int], None] | None,
) -> None:
    for number in range(STEP_LIMIT):
        if not engine.has_work():
            return
        result = engine.step()
        if result.failed:
            raise result.failed[0].error
        if not result.num_tokens:  # the step only reported finished requests
            continue
        record.elapsed = now()
        _note(record, result, number, engine.info.layout)
        if number % LOOK_EVERY == 0:
            record.looks.append(_look(engine, record, result, number))
        if progress is not None:
            progress(len(result.tokens))
    raise RuntimeError(f"the engine did not finish within {STEP_LIMIT} steps")


def _note(record: RunRecord, result: StepResult, number: int, layout: KVLayout) -> None:
    record.drafted_tokens += result.drafted
    record.accepted_drafts += result.accepted
    record.drafted_rows += len(result.drafts)
    for use in result.prompts:
        record.cached_tokens += use.cached
        record.host_tokens += use.host
    for progress in result.progress:
        live = record.lives[progress.request]
        live.seen, live.computed, live.blocks = number, progress.computed, len(progress.blocks)
    lengths = []  # of the sequences that got new tokens
    for token in result.tokens:
        live = record.lives[token.request]
        if live.seen != number or not live.times:
            lengths.append(live.prompt_len + len(live.times))
        live.seen = number
        live.times.append(record.elapsed)
    record.steps.append(
        BenchStep(
            end=record.elapsed,
            prompt_tokens=result.num_prompt_tokens,
            new_tokens=len(result.tokens),
            rows=len(lengths),
            kv_bytes=kv_read(layout, lengths),
        )
    )


def _look(engine: EngineCore, record: RunRecord, result: StepResult, number: int) -> CacheUse:
    """Sample the KV cache. Shared blocks are full, so summing each request's empty slots counts
    none twice. Requests that ended in this step still hold their blocks, because they are tracked.
    """
    layout, load = engine.info.layout, engine.load()
    empty = sum(_empty(live, layout) for live in record.lives.values() if live.seen == number)
    allocated = (load.total_blocks - load.free_blocks) * layout.block_size
    return CacheUse(allocated, empty, steady=result.num_prompt_tokens == 0, at=record.elapsed)


def _empty(live: BenchRequest, layout: KVLayout) -> int:
    """The empty token slots in a request's blocks, over all groups of layers. A generating request
    has KV for all its tokens but the last, in the fewest blocks that hold it."""
    size, groups = layout.block_size, layout.num_groups
    if not live.times:
        return live.blocks * size - live.computed * groups
    return -(live.prompt_len + len(live.times) - 1) % size * groups
