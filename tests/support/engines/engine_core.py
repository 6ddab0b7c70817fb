"""Requests, a scripted runner and a bounded drive loop for tests of the engine's core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from baton_engine.config.scheduling_options import DEFAULT_SCHEDULING, SchedulingOptions
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import (
    Complete,
    EngineInfo,
    Filled,
    PenaltyCounts,
    Progress,
    PromptUse,
    Row,
    RowResult,
    Sample,
    Sampled,
    StepResult,
    TokenOut,
)
from baton_engine.scheduling.draft_source import DraftSource
from baton_protocol.ids import BlockId, Fingerprint, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.request import PositionLogprobs, Request, TokenLogprob
from baton_protocol.sampling import SamplingParams
from tests.support.engines.demands import kv_layout

EOS = 99
LAYOUT = kv_layout(chunk=2)


class NoMemory:
    """A KVMemory without memory. It lists copies of blocks; every other access raises."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.copies: list[tuple[BlockId, BlockId]] = []

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        raise NotImplementedError

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        raise NotImplementedError

    def views(self, blocks: Sequence[BlockId]) -> None:
        raise NotImplementedError

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        self.copies += zip(sources, targets, strict=True)


class ScriptedRunner:
    """Samples `script(sample)`; a prompt token's log-probability is minus its position.

    It keeps copies of each step's rows, with tokens of unread steps filled in. Steps must be read
    in order, one by one.
    """

    def __init__(
        self, script: Callable[[Sample], int] | None = None, layout: KVLayout = LAYOUT
    ) -> None:
        self._memory = NoMemory(layout)
        self.script = script or (lambda sample: (sample.position + 10 * sample.choice) % 90)
        self.steps: list[list[Row]] = []
        self.events: list[str] = []  # "launch 0", "read 0", and so on
        self.unreadable: set[int] = set()  # steps that fail when they are read
        self.unread: list[int] = []
        self._launches = count()
        self._last_ids: list[int] = []

    @property
    def memory(self) -> NoMemory:
        return self._memory

    def launch(self, rows: Sequence[Row]) -> ScriptedStep:
        assert len(self.unread) < 2, "two steps are in flight"
        rows = [_copy(row, self._last_ids) for row in rows]
        samples = [tuple(Sampled(self.script(each)) for each in row.samples) for row in rows]
        self._last_ids = [each.id for sampled in samples for each in sampled]
        number = next(self._launches)
        self.unread.append(number)
        self.events.append(f"launch {number}")
        self.steps.append(rows)
        results = [
            RowResult(sampled, _prompt_logprobs(row))
            for sampled, row in zip(samples, rows, strict=True)
        ]
        return ScriptedStep(self, number, results)

    def work(self) -> list[list[tuple[int, int]]]:
        """(start, number of tokens) of each row, per step."""
        return [[(row.start, len(row.tokens)) for row in rows] for rows in self.steps]


@dataclass(frozen=True)
class ScriptedStep:
    runner: ScriptedRunner
    number: int
    results: list[RowResult]

    def read(self) -> list[RowResult]:
        assert self.runner.unread.pop(0) == self.number, "steps are read in order, once each"
        self.runner.events.append(f"read {self.number}")
        if self.number in self.runner.unreadable:
            raise RuntimeError("device lost")
        return self.results


def _copy(row: Row, last_ids: Sequence[int]) -> Row:
    """Copy a row with the lists and counts that the engine keeps changing."""
    samples = tuple(
        msgspec.structs.replace(
            each,
            penalty_counts=PenaltyCounts(
                tuple(each.penalty_counts.prompt), dict(each.penalty_counts.outputs)
            ),
        )
        if each.penalty_counts
        else each
        for each in row.samples
    )
    tokens, blocks = list(row.tokens), list(row.blocks)
    if row.awaited_sample is not None:
        tokens[-1] = last_ids[row.awaited_sample]
    return msgspec.structs.replace(row, tokens=tokens, blocks=blocks, samples=samples)


def _prompt_logprobs(row: Row) -> tuple[PositionLogprobs, ...]:
    """A log-probability for each prompt target of the row: its id, and minus its position."""
    targets = row.prompt.targets if row.prompt else ()
    return tuple(
        PositionLogprobs(TokenLogprob(id, -float(position)))
        for position, id in enumerate(targets, start=row.start + 1)
    )


def scripted(
    script: Callable[[Sample], int] | None = None,
    *,
    overlap: bool = False,
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    drafter: DraftSource | None = None,
    **changes: Any,
) -> tuple[EngineCore, ScriptedRunner]:
    """An engine of 16 blocks of 4 tokens over a ScriptedRunner; `changes` go to its EngineInfo."""
    fields: dict[str, Any] = {
        "kind": "sim",
        "model": "scripted",
        "fingerprint": Fingerprint("f" * 32),
        "layout": LAYOUT,
        "num_blocks": 16,
        "max_model_len": 64,
        "max_batched_tokens": 64,
        "max_num_seqs": 8,
        "vocab_size": 100,
        "eos_ids": (EOS,),
    }
    info = EngineInfo(**(fields | changes))
    runner = ScriptedRunner(script, info.layout)
    return EngineCore(info, runner, overlap=overlap, drafter=drafter, scheduling=scheduling), runner


def make_request(
    name: str,
    prompt: int | Sequence[int],
    outputs: tuple[tuple[int, ...], ...] = (),
    *,
    salt: str = "",
    attempt: int = 1,
    priority: int = 0,
    **params: Any,
) -> Request:
    """A greedy request for 4 new tokens. `prompt` is ids, or a number of ids to derive from
    `name`."""
    params.setdefault("temperature", 0.0)
    params.setdefault("max_tokens", 4)
    if isinstance(prompt, int):
        first = sum(name.encode())
        prompt = [(first + 7 * index) % 90 for index in range(prompt)]
    return Request(
        id=RequestId(name),
        attempt=attempt,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        outputs=outputs,
        salt=salt,
        priority=priority,
    )


@dataclass
class Run:
    """All results of an engine's steps."""

    tokens: list[TokenOut] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    prompts: list[PromptUse] = field(default_factory=list)
    complete: list[Complete] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)

    def ids(self, request: str, choice: int = 0) -> list[int]:
        tokens = [each for each in self.tokens if (each.request, each.choice) == (request, choice)]
        offsets = [each.offset for each in tokens]
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets))), offsets
        return [each.id for each in tokens]

    def all_ids(self) -> dict[tuple[str, int], list[int]]:
        keys = dict.fromkeys((str(each.request), each.choice) for each in self.tokens)
        return {key: self.ids(*key) for key in keys}

    def use(self, request: str) -> tuple[int, int, int]:
        """(cached, fetched, computed) prompt tokens of a request; the host tier gave the rest."""
        (use,) = [each for each in self.prompts if each.request == request]
        assert use.cached + use.host + use.fetched + use.computed == use.prompt
        return use.cached, use.fetched, use.computed

    def from_host(self, request: str) -> int:
        """Prompt tokens of a request that came from the host tier."""
        (use,) = [each for each in self.prompts if each.request == request]
        return use.host

    def prompt_logprobs(self, request: str) -> tuple[PositionLogprobs, ...]:
        (use,) = [each for each in self.prompts if each.request == request]
        return use.logprobs

    def last(self, request: str, choice: int = 0) -> TokenOut:
        return [each for each in self.tokens if (each.request, each.choice) == (request, choice)][
            -1
        ]


def drive(engine: EngineCore, max_steps: int = 3000, into: Run | None = None) -> Run:
    """Step until the engine has no work, and check the pool's integrity after every step."""
    run = into or Run()
    while engine.has_work():
        assert len(run.steps) < max_steps, f"not done after {max_steps} steps"
        step_once(engine, run)
    return run


def step_once(engine: EngineCore, run: Run) -> StepResult:
    result = engine.step()
    engine.check_integrity()
    assert result.num_tokens <= engine.info.max_batched_tokens
    assert result.num_seqs <= engine.info.max_num_seqs
    run.steps.append(result)
    run.tokens += result.tokens
    run.progress += result.progress
    run.filled += result.filled
    run.prompts += result.prompts
    run.complete += result.complete
    run.finished += result.finished
    return result


def run_all(engine: EngineCore, requests: Iterable[Request]) -> Run:
    for request in requests:
        engine.submit(request)
    return drive(engine)
