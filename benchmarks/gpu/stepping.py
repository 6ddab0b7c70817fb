"""Engines that are stepped and timed: batches of generating rows, and what a step costs whom.

In: an EngineCore. Out: milliseconds per step, and where they go: to the device, or to the host.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import KVMemory, Launched, Matcher, Row, RowResult, Runner
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.gpu.device_time import PASSES, Moment, hold

MOST_STEPS = 20_000
WARM_STEPS = 4
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=100_000)
# What Qwen3's generation_config.json asks for.
QWEN3_DEFAULTS = SamplingParams(
    temperature=0.6, top_k=20, top_p=0.95, seed=7, ignore_eos=True, max_tokens=100_000
)

Prompt = tuple[int, ...]
Ids = Mapping[tuple[str, int], list[int]]


def random_prompts(count: int, length: int, vocab: int, *, seed: int = 0) -> list[Prompt]:
    """Prompts of random ids. Shorter ones of the same seed are the beginnings of longer ones, so an
    engine that has computed these finds those in its prefix cache."""
    prompts = []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        prompts.append(tuple(draw.randrange(vocab) for _ in range(length)))
    return prompts


def requests_of(
    prompts: Sequence[Prompt], params: SamplingParams, *, name: str = "", salt: str = ""
) -> list[Request]:
    return [
        Request(
            id=RequestId(f"{name}{number}"),
            attempt=0,
            prompt_ids=prompt,
            params=params,
            outputs=((),) * params.n,
            salt=salt,
        )
        for number, prompt in enumerate(prompts)
    ]


def complete(engine: EngineCore, requests: Sequence[Request]) -> Ids:
    """Submit all requests, and step until they have ended. Returns the ids of each choice."""
    found: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(MOST_STEPS):
        if not engine.has_work():
            return found
        for token in engine.step().tokens:
            found.setdefault((token.request, token.choice), []).append(token.id)
    raise RuntimeError(f"the engine did not finish within {MOST_STEPS} steps")


@contextmanager
def generating(
    engine: EngineCore,
    requests: Sequence[Request],
    matchers: Mapping[int, Matcher] | None = None,
) -> Iterator[None]:
    """All requests have their prompts computed and generate, until the end of the block. `matchers`
    has the grammars of some, by their place in `requests`."""
    for number, request in enumerate(requests):
        engine.submit(request, matcher=(matchers or {}).get(number))
    begun: set[str] = set()
    try:
        for _ in range(MOST_STEPS):
            begun |= {token.request for token in engine.step().tokens}
            if len(begun) == len(requests):
                break
        yield
    finally:
        for request in requests:
            engine.abort(request.id)
        while engine.has_work():
            engine.step()


def step_ms(engine: EngineCore, steps: int) -> float:
    """Milliseconds per step, the median of PASSES passes. With overlap, each call of step()
    launches a step and waits for the one before, so a pass is as long as its steps."""
    for _ in range(WARM_STEPS):
        engine.step()
    found = []
    for _ in range(PASSES):
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        found.append((time.perf_counter() - began) * 1e3 / steps)
    return statistics.median(found)


@dataclass(slots=True)
class StepTime:
    """What a launched step cost. `launch_ms` is the host's time to launch it, `wait_ms` the time
    that the host then waited for it."""

    rows: int
    tokens: int
    begin: Moment
    launch_ms: float = 0.0
    wait_ms: float = 0.0
    end: Moment | None = None

    @property
    def device_ms(self) -> float:
        assert self.end is not None
        return self.begin.ms_until(self.end)


@dataclass(slots=True)
class TimedRunner:
    """A Runner that notes what each step costs. With `held`, the device spins before each step, so
    `device_ms` holds none of the time in which it would wait for the host; the time of a call of
    step() then means nothing."""

    inner: Runner
    device: torch.device
    held: bool = False
    steps: list[StepTime] = field(default_factory=list)

    @property
    def memory(self) -> KVMemory:
        return self.inner.memory

    def launch(self, rows: Sequence[Row]) -> Launched:
        if self.held:
            hold(self.device)
        noted = StepTime(len(rows), sum(len(row.tokens) for row in rows), Moment(self.device))
        began = time.perf_counter()
        launched = self.inner.launch(rows)
        noted.launch_ms = (time.perf_counter() - began) * 1e3
        noted.end = Moment(self.device)
        self.steps.append(noted)
        return _TimedStep(launched, noted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True, slots=True)
class _TimedStep:
    launched: Launched
    noted: StepTime

    def read(self) -> list[RowResult]:
        assert self.noted.end is not None
        began = time.perf_counter()
        self.noted.end.wait()
        self.noted.wait_ms = (time.perf_counter() - began) * 1e3
        return self.launched.read()


def timed(engine: EngineCore, device: torch.device) -> tuple[EngineCore, TimedRunner]:
    """An engine over the same runner and pool that notes what each step costs. It has an empty
    prefix cache, and overwrites what is in that of `engine`, which must not run again."""
    runner = TimedRunner(engine.runner, device)
    return EngineCore(engine.info, runner, overlap=engine.overlap), runner


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians of milliseconds per step: in all; on the device without waiting for the host; on the
    host without waiting for the device; and of the latter, for the launch."""

    whole: float
    device: float
    host: float
    launch: float

    @property
    def idle_share(self) -> float:
        """The share of a step in which the device waits."""
        return max(0.0, 1 - self.device / self.whole)


def cost_of(engine: EngineCore, runner: TimedRunner, steps: int) -> StepCost:
    """What the steps of the rows that generate now cost. The engine is one that `timed` made. Rows
    get longer with each step, so half of the steps that show the device's time come before those
    that are timed whole, and half after."""
    whole, host, launch, device = [], [], [], []
    few = max(1, steps // 4)
    for _ in range(PASSES):
        before = held_steps(engine, runner, few)
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        passed = (time.perf_counter() - began) * 1e3
        free = runner.steps[-steps:]
        whole.append(passed / steps)
        host.append((passed - sum(step.wait_ms for step in free)) / steps)
        launch += [step.launch_ms for step in free]
        after = held_steps(engine, runner, few)
        device += [statistics.fmean(step.device_ms for step in (*before, *after))]
    return StepCost(*(statistics.median(each) for each in (whole, device, host, launch)))


def held_steps(engine: EngineCore, runner: TimedRunner, steps: int) -> list[StepTime]:
    """The notes of steps before each of which the device spins. Nothing spins afterwards."""
    runner.steps.clear()
    runner.held = True
    try:
        for _ in range(steps):
            engine.step()
    finally:
        runner.held = False
    found = list(runner.steps)
    for _ in range(WARM_STEPS):
        engine.step()
    return found
