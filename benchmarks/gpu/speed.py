"""The part `speed`: how fast the engine is, beside the bytes it moves and beside transformers.

In: the device and the card's bounds. Out: tokens per second of nano-vllm's workload, the times of
decode steps, prompts and mixed steps and who spends them, transfers of KV, start-up and memory. All
weights are random, which changes no time.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch

from baton_cli.bench.workload import Workload
from baton_engine.build import build_runner
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import KVMemory
from baton_engine.progress import ProgressLine
from baton_engine.runner.profile_run import AnyToken
from baton_engine.runner.warm_up import warm_all
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams, StructuredOutput
from benchmarks.gpu.device_time import PASSES, synchronize
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.in_order import Task, reach, run_in_order, stay_below
from benchmarks.gpu.names import ONE_BY_ONE, WORKLOAD
from benchmarks.gpu.new_kernels import counting_variants
from benchmarks.gpu.rival import generate_s, random_model
from benchmarks.gpu.shapes import GB, GIB, Shape, reference_workload, share
from benchmarks.gpu.stepping import (
    GREEDY,
    QWEN3_DEFAULTS,
    complete,
    cost_of,
    generating,
    held_steps,
    random_prompts,
    requests_of,
    step_ms,
    timed,
)

# The goals: shares of the bytes' bound, and times transformers' speed.
FLOOR_SHARE = 0.5
TIMES_ONE_BY_ONE = 14.0
IDLE_SHARE = 0.03
MEMORY_SHARE = 0.9  # the default of --gpu-memory-utilization
BATCHED_TOKENS = 16_384
HOST_KV = 5 * GIB
TRANSFER_BYTES = 512 << 20


@dataclass(frozen=True)
class Sizes:
    """How much is measured: on a card, and in a dry run."""

    rows: Sequence[int] = (1, 8, 64, 256)
    contexts: Sequence[int] = (256, 1024)
    steps: int = 24
    prompts: Sequence[int] = (2048, 16_384)
    first_prompts: Sequence[int] = (300, 600, 1100)
    mixed: Sequence[int] = (16, 256, 2048)
    batch: int = 64
    batch_tokens: int = 128
    alone: int = 2
    alone_tokens: int = 64


DRY = Sizes(
    rows=(1, 4),
    contexts=(16,),
    steps=2,
    prompts=(32,),
    first_prompts=(20, 40),
    mixed=(3, 16),
    batch=2,
    batch_tokens=3,
    alone=1,
    alone_tokens=2,
)


def run(findings: Findings) -> None:
    Speed(findings, DRY if findings.dry else Sizes()).run()


@dataclass
class Speed:
    """The measurements. `ours` has tokens per second by workload, for the ratios to transformers'
    in the same run."""

    findings: Findings
    sizes: Sizes
    ours: dict[str, float] = field(default_factory=dict)

    @property
    def small(self) -> Shape:
        return Shape(self.findings, "qwen3-0.6b")

    def run(self) -> None:
        run_in_order(
            self.findings,
            [
                Task("Qwen3-0.6B's shape", 45, self.on_one_engine, group=True),
                Task("transformers", 15, self.beside_transformers),
                Task("Qwen3-8B's shape", 15, self.larger_model),
                Task("host tier", 10, self.host_tier),
                Task("recording graphs", 8, self.recording),
            ],
        )

    # --- one engine, with the whole card ----------------------------------------------------------

    def on_one_engine(self) -> None:
        before = memory_in_use(self.findings.device)
        began = time.perf_counter()
        with self.small.engine(max_batched_tokens=BATCHED_TOKENS) as engine:
            self.findings.measured("start-up", time.perf_counter() - began, "s")
            rows = TimedRows(self, engine)
            run_in_order(
                self.findings,
                [
                    Task("first prompts", 6, lambda: self.first_prompts(engine)),
                    Task("workload", 40, lambda: self.workload(engine)),
                    Task("memory", 0, lambda: self.memory(before)),
                    Task("decode steps", 25, lambda: self.decode_steps(engine)),
                    Task("prompts", 4, lambda: self.prompts(engine)),
                    Task("transfers", 6, lambda: self.transfers(engine.memory)),
                    # These two come last, on an engine over the same pool.
                    Task("idle device", 6, rows.idle),
                    Task("mixed steps", 6, rows.mixed),
                ],
            )

    def first_prompts(self, engine: EngineCore) -> None:
        """On an engine that has served nothing: does a first prompt stop the rows that generate?"""
        beside = random_prompts(self.sizes.rows[1], 16, self.small.vocab, seed=1)
        with generating(engine, requests_of(beside, GREEDY, name="row ")):
            usual = step_ms(engine, self.sizes.steps)
            for length in self.sizes.first_prompts:
                [prompt] = random_prompts(1, length, self.small.vocab, seed=length)
                params = msgspec.structs.replace(GREEDY, max_tokens=1)
                with counting_variants() as variants:
                    engine.submit(*requests_of([prompt], params, name="first"))
                    longest = max(timed_ms(engine.step) for _ in range(6))
                name = f"longest step, first prompt of {length} tokens"
                note = f"beside {len(beside)} rows, whose steps take {usual:.1f} ms"
                self.findings.measured(name, longest, "ms", note=note)
                name = f"kernels first compiled or loaded by a first prompt of {length} tokens"
                stay_below(self.findings, name, len(variants), "", 0)

    def workload(self, engine: EngineCore) -> None:
        """nano-vllm's workload, and a small one for transformers. Each pass has a salt of its own,
        so none finds KV of another."""
        work = reference_workload(self.small)
        speeds = self.speeds_of(engine, work, PASSES)
        speed = self.ours["workload"] = statistics.median(speeds)
        note = f"{len(work.items)} requests, {work.output_tokens:,} tokens; passes: "
        note += " ".join(f"{each:,.0f}" for each in speeds)
        self.findings.measured(WORKLOAD, speed, "tokens/s", note=note)
        floor_ms = self.small.workload_floor_ms(work)
        if floor_ms is not None:
            reached = share(floor_ms, work.output_tokens / speed * 1e3) or 0.0
            reach(
                self.findings, "the workload's share of the bytes' bound", reached, "", FLOOR_SHARE
            )
        self.ours["batch"] = statistics.median(self.speeds_of(engine, self.batch_of(work), PASSES))

    def batch_of(self, work: Workload) -> Workload:
        """A part of the workload that transformers ends in seconds."""
        items = [
            each._replace(new_tokens=self.sizes.batch_tokens)
            for each in work.items[: self.sizes.batch]
        ]
        return Workload("batch", tuple(items), temperature=0.0)

    def speeds_of(self, engine: EngineCore, work: Workload, passes: int) -> list[float]:
        """Tokens per second of each pass, as many as fit in the time, after a short one."""
        complete(engine, requests_of([work.items[0].prompt], short(GREEDY), salt="warm"))
        speeds: list[float] = []
        for number in range(passes):
            began = time.perf_counter()
            found = complete(engine, work.requests(seed=0, salt=f"{work.name} {number} "))
            took = time.perf_counter() - began
            speeds.append(work.output_tokens / took)
            if sum(map(len, found.values())) != work.output_tokens:
                raise AssertionError(f"not {work.output_tokens} tokens were generated")
            if not self.findings.dry and self.findings.seconds_left < 3 * took + 60:
                break
        return speeds

    def memory(self, before: int) -> None:
        """What the engine left of its share of the card, after it has served."""
        device = self.findings.device
        if device.type != "cuda":
            self.findings.noted("memory left", "a CPU has no share")
            return
        _, total = torch.cuda.mem_get_info(device)
        limit, used = total * MEMORY_SHARE, memory_in_use(device)
        note = f"{used / GB:.1f} of {limit / GB:.1f} GB, {before / GB:.1f} before the start"
        self.findings.measured(
            *("memory left of the engine's share", (limit - used) / GB, "GB"),
            share=used / limit,
            of="--gpu-memory-utilization",
            note=note,
        )

    def decode_steps(self, engine: EngineCore) -> None:
        """Times of decode steps, the longest context first: shorter ones find their KV in the
        cache."""
        cases = [
            (name, params, context, rows)
            for name, params in (("greedy", GREEDY), ("Qwen3's defaults", QWEN3_DEFAULTS))
            for context in reversed(self.sizes.contexts)
            for rows in reversed(self.sizes.rows)
        ]
        for name, params, context, rows in cases:
            found = self.decode_ms(engine, self.small, (rows, context), params)
            self.report(self.small, f"decode step, {rows} rows, context {context}, {name}", found)

    def decode_ms(
        self, engine: EngineCore, shape: Shape, sizes: tuple[int, int], params: SamplingParams
    ) -> tuple[float, float | None]:
        """Milliseconds of a step of (rows, context), and the least."""
        rows, context = sizes
        prompts = random_prompts(rows, context, shape.vocab)
        with generating(engine, requests_of(prompts, params)):
            found = step_ms(engine, self.sizes.steps)
        keys = context + self.sizes.steps * PASSES / 2
        return found, shape.decode_floor_ms(rows, keys)

    def report(self, shape: Shape, name: str, found: tuple[float, float | None]) -> None:
        value, floor = found
        of = "the bytes' bound" if floor is not None else ""
        self.findings.measured(name, value, "ms", share=share(floor, value), of=of)

    def prompts(self, engine: EngineCore) -> None:
        for length in self.sizes.prompts:
            [prompt] = random_prompts(1, length, self.small.vocab)
            params = msgspec.structs.replace(GREEDY, max_tokens=1)
            found = []
            for number in range(PASSES + 1):
                requests = requests_of([prompt], params, salt=f"prompt {number}")
                found.append(timed_ms(partial(complete, engine, requests)))
            value = statistics.median(found[1:])
            floor = self.small.prefill_floor_ms(length)
            name = f"prompt of {length} tokens"
            of = "the products' bound" if floor is not None else ""
            note = f"{length / value * 1e3:,.0f} tokens/s"
            self.findings.measured(name, value, "ms", share=share(floor, value), of=of, note=note)

    def transfers(self, memory: KVMemory) -> None:
        """KV blocks at random places, to and from host memory."""
        count = max(8, min(400, TRANSFER_BYTES // memory.layout.block_bytes))
        blocks = random.Random(0).sample(range(1, count + 1), count)
        for threads in (1, 4):
            parts = [[BlockId(each) for each in blocks[at::threads]] for at in range(threads)]
            size = memory.layout.block_bytes
            buffers = [memoryview(bytearray(len(part) * size)) for part in parts]
            with ThreadPoolExecutor(threads) as pool:
                for name, act in (("gather", memory.read), ("scatter", memory.write)):
                    times = []
                    for _ in range(PASSES + 1):  # the first allocates each thread's staging
                        began = time.perf_counter()
                        list(pool.map(act, parts, buffers))
                        times.append((time.perf_counter() - began) * 1e3)
                    speed = count * size / statistics.median(times[1:]) / 1e6
                    self.findings.measured(f"{name} of KV, {threads} threads", speed, "GB/s")

    # --- others -----------------------------------------------------------------------------------

    def beside_transformers(self) -> None:
        """The same prompts as one static batch, and a few one by one."""
        device = self.findings.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = random_model(self.small.folder, device, dtype)
        work = self.batch_of(reference_workload(self.small))
        prompts = [list(item.prompt) for item in work.items]
        generate_s(model, prompts[:1], 2)
        seconds = generate_s(model, prompts, self.sizes.batch_tokens)
        batch = work.output_tokens / seconds
        note = f"{len(prompts)} prompts of the workload, {self.sizes.batch_tokens} tokens each"
        self.findings.measured("transformers, static batch", batch, "tokens/s", note=note)
        alone = self.sizes.alone
        seconds = sum(
            generate_s(model, [each], self.sizes.alone_tokens) for each in prompts[:alone]
        )
        one = alone * self.sizes.alone_tokens / seconds
        note = f"{alone} prompts, {self.sizes.alone_tokens} tokens each"
        self.findings.measured("transformers, one by one", one, "tokens/s", note=note)
        if "batch" in self.ours:
            ratio = self.ours["batch"] / batch
            name = "the same prompts, times transformers' static batch"
            self.findings.measured(name, ratio, "x", share=ratio, of="transformers")
        if "workload" in self.ours:
            reach(self.findings, ONE_BY_ONE, self.ours["workload"] / one, "x", TIMES_ONE_BY_ONE)

    def larger_model(self) -> None:
        shape = Shape(self.findings, "qwen3-8b")
        context = self.sizes.contexts[-1]
        began = time.perf_counter()
        with shape.engine(kv_memory=16 * GIB, max_num_seqs=64) as engine:
            self.findings.measured("start-up, Qwen3-8B", time.perf_counter() - began, "s")
            for rows in (self.sizes.batch, 1):
                found = self.decode_ms(engine, shape, (rows, context), GREEDY)
                self.report(shape, f"Qwen3-8B, decode step, {rows} rows, context {context}", found)

    def host_tier(self) -> None:
        """What --host-kv-memory takes; a reservation under load; a row with a grammar."""
        before = available_bytes(), resident_bytes()
        asked = 64 << 20 if self.findings.dry else HOST_KV
        rows = self.sizes.rows[1] if self.findings.dry else 32
        with self.small.engine(kv_memory=8 * GIB, host_kv_memory=asked) as engine:
            name = f"host memory taken by --host-kv-memory {asked / GIB:g}GiB"
            taken = (before[0] - available_bytes()) / GIB
            note = f"the process has {(resident_bytes() - before[1]) / GIB:.1f} GiB more"
            self.findings.measured(
                *(name, taken, "GiB"),
                share=asked / GIB / taken if taken > 0 else None,
                of="goal: as asked",
                note=note,
            )
            prompts = random_prompts(rows, self.sizes.contexts[0], self.small.vocab)
            requests = requests_of(prompts, GREEDY)
            with generating(engine, requests):
                plain = step_ms(engine, self.sizes.steps)
                self.reservation(engine)
            bound = msgspec.structs.replace(GREEDY, structured=StructuredOutput("any"))
            requests[0] = msgspec.structs.replace(requests[0], params=bound)
            with generating(engine, requests, {0: AnyToken(self.small.vocab)}):
                grammar = step_ms(engine, self.sizes.steps)
            name = f"decode step, {rows} rows of which one has a grammar"
            note = f"{plain:.2f} ms without; the mask allows all tokens and costs nothing to make"
            self.findings.measured(
                name, grammar, "ms", share=plain / grammar, of="without a grammar", note=note
            )

    def reservation(self, engine: EngineCore) -> None:
        """How long the step loop waits for a reservation."""
        found = []
        for number in range(self.sizes.steps):
            [prompt] = random_prompts(1, self.sizes.contexts[0], self.small.vocab, seed=number + 9)
            [request] = requests_of([prompt], GREEDY, name="reserved")
            engine.step()
            began = time.perf_counter()
            reservation = engine.reserve(request)
            found.append((time.perf_counter() - began) * 1e3)
            if reservation is not None:
                engine.release(reservation)
        name = "a reservation while rows generate, with a host tier"
        self.findings.measured(name, statistics.median(found), "ms")

    def recording(self) -> None:
        """Graphs of all sizes, kernels compiled before."""
        runner = build_runner(self.small.settings(kv_memory=4 * GIB))
        synchronize(self.findings.device)
        with ProgressLine(sys.stderr) as line:
            took = (
                timed_ms(partial(warm_all, runner.buckets, runner.warm, runner.warm_eager, line))
                / 1e3
            )
        sizes = len(runner.buckets)
        self.findings.measured("recording of graphs", took, "s", note=f"{sizes} sizes")


@dataclass
class TimedRows:
    """Measurements of the largest batch on an engine that notes what its steps cost."""

    speed: Speed
    original: EngineCore

    def __post_init__(self) -> None:
        self.findings, self.sizes = self.speed.findings, self.speed.sizes
        self.engine, self.runner = timed(self.original, self.findings.device)

    @property
    def rows(self) -> int:
        return self.sizes.rows[-1]

    def _prompts(self, rows: int) -> list[tuple[int, ...]]:
        return random_prompts(rows, self.sizes.contexts[0], self.speed.small.vocab)

    def idle(self) -> None:
        """Does overlap hide the host's work?"""
        for kind, params in (("greedy", GREEDY), ("Qwen3's defaults", QWEN3_DEFAULTS)):
            with generating(self.engine, requests_of(self._prompts(self.rows), params)):
                cost = cost_of(self.engine, self.runner, self.sizes.steps)
            where = f"{self.rows} rows, {kind}"
            note = f"device {cost.device:.2f} ms, launch {cost.launch:.2f} ms"
            self.findings.measured(f"a step, {where}", cost.whole, "ms", note=note)
            self.findings.measured(f"the host's work in a step, {where}", cost.host, "ms")
            name = f"idle share of the device, {where}"
            stay_below(self.findings, name, cost.idle_share, "", IDLE_SHARE)

    def mixed(self) -> None:
        """One prompt beside rows that generate."""
        params = msgspec.structs.replace(GREEDY, max_tokens=1)
        prompts = self._prompts(self.rows - 1)
        with generating(self.engine, requests_of(prompts, GREEDY)):
            for length in self.sizes.mixed:
                device, launch, whole = [], [], []
                for number in range(2 * PASSES + 1):
                    [prompt] = random_prompts(1, length, self.speed.small.vocab)
                    one = requests_of([prompt], params, name="mixed", salt=f"{length} {number}")
                    self.engine.submit(*one)
                    if number % 2:
                        steps = held_steps(self.engine, self.runner, 3)
                        longest = max(steps, key=lambda step: step.tokens)
                        device.append(longest.device_ms)
                        launch.append(longest.launch_ms)
                    else:
                        # Three calls: the prompt's step is launched in one and read in the next.
                        whole.append(max(timed_ms(self.engine.step) for _ in range(3)))
                name = f"mixed step, {len(prompts)} rows and a prompt of {length} tokens"
                self.findings.measured(f"{name}, device", statistics.median(device), "ms")
                self.findings.measured(f"{name}, launch", statistics.median(launch), "ms")
                self.findings.measured(f"{name}, longest call", statistics.median(whole[1:]), "ms")


def short(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, max_tokens=8)


def timed_ms(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


def memory_in_use(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Bytes of the machine's memory that programs could still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
