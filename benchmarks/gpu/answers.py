"""The part `answers`: the same ids on all paths of the engine, on this device.

In: the device. Out: checks, one per model and path, and what --batch-invariant costs.

Each family has a tiny random model, and a process of its own: most of its time goes into compiling
kernels, and a device error ends only that process. The rest runs here, on Qwen3-0.6B's shape.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from baton_engine.core.engine_core import EngineCore
from baton_protocol.ids import BlockId
from benchmarks.gpu.family_answers import Family
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.in_order import GOAL, Task, free_memory, run_in_order
from benchmarks.gpu.rival import random_model, references
from benchmarks.gpu.shapes import GIB, Shape
from benchmarks.gpu.stepping import (
    GREEDY,
    Ids,
    complete,
    generating,
    random_prompts,
    requests_of,
    step_ms,
)
from tests.bits.cells import MODELS, Bench
from tests.bits.paths import PATHS
from tests.support.engines.exactness import Tally, compare

# A process has a context of 0.5 GB on the device, and one busy core.
MOST_PROCESSES = 12
FAMILIES_S = 45.0
# Most of a model's time goes into compiling its kernels, on a core of its own. More models than
# processes would take twice FAMILIES_S, so those are left out whose kernels, and whose layers on a
# card, others have. The tests of equal bits and of each family have them all, on CPUs.
KERNELS_OF_OTHERS = (
    *("llama-gqa2-tied", "llama-gqa4", "llama3-rope", "phi3-long-rope", "qwen3-window"),
    *("gemma2", "qwen2-moe", "deepseek-v3"),
)
MOST_TRIES = 3
MOST_FAMILIES_S = 70.0  # a process that hangs ends then
# What --batch-invariant on may cost for `auto` to choose it.
EXACT_SHARE = 0.9
LARGE = 1 << 32  # elements that 32 bits can count
TRANSFER_THREADS = 4
MODEL_PATHS = ("in crowds", "with overlap")


@dataclass(frozen=True)
class Sizes:
    """How much is compared: on a card, and in a dry run."""

    models: Sequence[str] = tuple(name for name in MODELS if name not in KERNELS_OF_OTHERS)
    prompt: int = 120
    new_tokens: int = 32
    rows: Sequence[int] = (1, 64, 256)
    context: int = 256
    steps: int = 24
    busy_rows: int = 64
    busy_tokens: int = 200
    pool_memory: int = 12 * GIB


DRY = Sizes(
    models=("qwen3-window",),
    prompt=20,
    new_tokens=4,
    rows=(1, 4),
    context=16,
    steps=2,
    busy_rows=3,
    busy_tokens=8,
)


def run(findings: Findings) -> None:
    part = Answers(findings, DRY if findings.dry else Sizes())
    tasks = [
        Task("families", FAMILIES_S, part.families),
        Task("Qwen3-0.6B's shape, ids as transformers'", 12, part.as_transformers),
        Task("cost of --batch-invariant", 15, part.cost_of_exact),
        Task("KV moves and a large pool", 14, part.on_a_large_pool, group=True),
        Task("Qwen3-0.6B's shape, equal bits", 20, part.equal_bits),
    ]
    run_in_order(findings, tasks)


@dataclass(frozen=True)
class Answers:
    findings: Findings
    sizes: Sizes

    @property
    def shape(self) -> Shape:
        return Shape(self.findings, "qwen3-0.6b")

    def families(self) -> None:
        """A process per model, some at a time. One that dies is started again, and goes on behind
        the check that it died of."""
        start = multiprocessing.get_context("spawn")
        most = 1 if self.findings.dry else min(MOST_PROCESSES, os.cpu_count() or 1)
        waiting = [
            Family(self.findings, model, number, len(self.sizes.models))
            for number, model in enumerate(self.sizes.models)
        ]
        running: list[tuple[Family, SpawnProcess]] = []
        tries: Counter[str] = Counter()
        until = math.inf if self.findings.dry else time.monotonic() + MOST_FAMILIES_S
        while waiting or running:
            while waiting and len(running) < most:
                family = waiting.pop(0)
                tries[family.model] += 1
                # A daemon ends with its parent.
                process = start.Process(target=family.run, daemon=True)
                process.start()
                running.append((family, process))
            late = time.monotonic() > until
            for family, process in [*running]:
                process.join(0.05)
                if late:
                    process.kill()
                    process.join()
                if process.exitcode is None:
                    continue
                running.remove((family, process))
                if process.exitcode:
                    note = f"a process ended with {process.exitcode}"
                    self.findings.checked(family.model, False, note)
                    if not late and tries[family.model] < MOST_TRIES:
                        waiting.append(family)
            if late and waiting:
                names = ", ".join(family.model for family in waiting)
                raise TimeoutError(f"no time was left for {names}")

    def as_transformers(self) -> None:
        """In fp32, from a checkpoint with random weights."""
        device, new_tokens = self.findings.device, self.sizes.new_tokens
        prompts = random_prompts(4, self.sizes.prompt, self.shape.vocab)
        with tempfile.TemporaryDirectory(prefix="baton-gpu-") as name:
            # What bf16 can hold has the same value in fp32.
            model = random_model(self.shape.folder, device, torch.bfloat16, eager=True)
            model.save_pretrained(name)
            expected = references(model.float(), prompts, new_tokens)
            del model
            free_memory()
            for label, changes in (("graphs, overlap", {}), ("neither", NEITHER)):
                settings: dict[str, Any] = {
                    "model": Path(name),
                    "load_format": "auto",
                    "dtype": "float32",
                    "max_num_seqs": 20,
                    "kv_memory": 2 * GIB,
                    **changes,
                }
                with self.shape.engine(**settings) as engine:
                    params = msgspec.structs.replace(GREEDY, max_tokens=new_tokens)
                    found = complete(engine, requests_of(prompts, params))
                tally = Tally()
                for number, reference in enumerate(expected):
                    compare(reference, found[str(number), 0], tally, f"prompt {number}")
                tally.check()
                name_of = f"Qwen3-0.6B's shape, fp32, {label}: ids as transformers'"
                self.findings.checked(name_of, True, str(tally))

    def cost_of_exact(self) -> None:
        """Decode steps with --batch-invariant on beside off, in bf16."""
        off, on = (self._step_times(exact) for exact in ("off", "on"))
        for rows in self.sizes.rows:
            share = off[rows] / on[rows]
            self.findings.measured(
                *(f"decode step with --batch-invariant on, {rows} rows", on[rows], "ms"),
                share=share / EXACT_SHARE,
                of=f"{GOAL}at least {EXACT_SHARE:g} of the speed of off",
                note=f"off {off[rows]:.2f} ms",
            )

    def _step_times(self, exact: str) -> Mapping[int, float]:
        found = {}
        settings = {"batch_invariant": exact, "kv_memory": 16 * GIB}
        with self.shape.engine(**settings) as engine:
            for rows in reversed(self.sizes.rows):
                prompts = random_prompts(rows, self.sizes.context, self.shape.vocab)
                with generating(engine, requests_of(prompts, GREEDY)):
                    found[rows] = step_ms(engine, self.sizes.steps)
        return found

    def on_a_large_pool(self) -> None:
        with self.shape.engine(kv_memory=self.sizes.pool_memory, max_num_seqs=128) as engine:
            tasks = [
                Task("the last block of a large pool", 4, lambda: self.last_block(engine)),
                Task("KV moves while rows generate", 6, lambda: self.moving(engine)),
            ]
            run_in_order(self.findings, tasks)

    def last_block(self, engine: EngineCore) -> None:
        """A request whose KV is in the pool's last blocks has the ids and the KV that it has in the
        first: offsets beyond 2^32 elements are right."""
        layout, item = engine.info.layout, 4 if self.findings.dry else 2
        elements = engine.info.num_blocks * layout.block_bytes // item
        [prompt] = random_prompts(1, self.sizes.prompt, self.shape.vocab, seed=3)
        params = msgspec.structs.replace(GREEDY, max_tokens=self.sizes.new_tokens)
        full = len(prompt) // layout.block_size
        needed = -(-(len(prompt) + self.sizes.new_tokens) // layout.block_size) + 1
        pool = f"a pool of {elements:,} elements"
        found, kv = [], []
        for place in ("first", "last"):
            [request] = requests_of([prompt], params, name=place, salt=place)
            # Blocks are handed out in ascending order. Those that the first request has given back
            # come after the last.
            with filled(engine, 2 * needed if place == "last" else None):
                reservation = engine.reserve(request)
                assert reservation is not None, "the pool is full"
                blocks = reservation.blocks
                engine.hold(blocks)
                engine.submit(request, reservation=reservation)
                found.append(complete(engine, [])[request.id, 0])
                kv.append(read_blocks(engine, blocks[:full]))
                sent = random.Random(1).randbytes(layout.block_bytes)
                engine.memory.write(blocks[-1:], memoryview(sent))
                same = read_blocks(engine, blocks[-1:]) == sent
                engine.unhold(blocks)
            note = f"blocks {min(blocks)} to {max(blocks)} of {engine.info.num_blocks}"
            self.findings.checked(f"{pool}, {place} blocks: read back as written", same, note)
        begin = min(blocks) * layout.block_bytes // item
        beyond = self.findings.dry or begin > LARGE
        self.findings.checked(f"{pool}: the last blocks begin at element {begin:,}", beyond)
        self.findings.checked(f"{pool}: the same KV in the first and the last", kv[0] == kv[1])
        self.findings.checked(f"{pool}: the same ids", found[0] == found[1])

    def moving(self, engine: EngineCore) -> None:
        """Transfers beside a running batch change neither its ids nor the bytes they carry."""
        prompts = random_prompts(self.sizes.busy_rows, self.sizes.prompt, self.shape.vocab)
        params = msgspec.structs.replace(GREEDY, max_tokens=self.sizes.busy_tokens)
        found: list[Ids] = []
        times: list[float] = []
        moves: list[int] = []
        for label in ("warm", "still", "moving"):
            with transfers(engine, self.shape, TRANSFER_THREADS * (label == "moving")) as counts:
                began = time.perf_counter()
                found.append(complete(engine, requests_of(prompts, params, salt=label)))
                times.append(time.perf_counter() - began)
            moves = [count for count in counts if count >= 0]
            intact = len(moves) == len(counts)
        name = f"{TRANSFER_THREADS} threads move KV while {len(prompts)} rows generate"
        note = f"{sum(moves)} blocks written and read back"
        self.findings.checked(f"{name}: ids as without", found[1] == found[2], note)
        self.findings.checked(f"{name}: bytes as sent", intact and bool(sum(moves)), note)
        share = times[1] / times[2]
        step = times[2] * 1e3 / self.sizes.busy_tokens
        self.findings.measured(f"{name}: step", step, "ms", share=share, of="without transfers")

    def equal_bits(self) -> None:
        """Paths of the suite of equal bits, at the model's real shape."""
        dtype = "float32" if self.findings.dry else "bfloat16"
        bench = ShapeBench(
            self.shape.folder, dtype, device=str(self.findings.device), thorough=False
        )
        for path in MODEL_PATHS[:1] if self.findings.dry else MODEL_PATHS:
            PATHS[path](bench)
            self.findings.checked(f"Qwen3-0.6B's shape, {dtype}, equal bits: {path}", True)


NEITHER = {"enforce_eager": True, "overlap": "off"}


class ShapeBench(Bench):
    """A bench of a model without a checkpoint."""

    def engine(self, **settings: Any) -> EngineCore:
        return super().engine(**{"load_format": "dummy", "max_num_seqs": 64, **settings})


@contextmanager
def filled(engine: EngineCore, left: int | None) -> Iterator[None]:
    """Reserve all blocks of the pool but `left`, the last ones; None reserves nothing."""
    held = []
    if left is not None:
        spare = engine.load().free_blocks - left
        size, vocab = engine.info.layout.block_size, engine.info.vocab_size
        number = 0
        while spare > 0:
            blocks = min(spare, engine.info.max_model_len // size - 1)
            [prompt] = random_prompts(1, blocks * size, vocab, seed=number)
            number += 1
            [request] = requests_of([prompt], GREEDY, name=f"filler {number} ", salt=str(number))
            reservation = engine.reserve(request)
            assert reservation is not None, f"{blocks} of {spare} blocks are not free"
            held.append(reservation)
            spare -= len(reservation.blocks)
    try:
        yield
    finally:
        for reservation in held:
            engine.release(reservation)


def read_blocks(engine: EngineCore, blocks: Sequence[BlockId]) -> bytes:
    into = bytearray(len(blocks) * engine.info.layout.block_bytes)
    engine.memory.read(blocks, memoryview(into))
    return bytes(into)


@contextmanager
def transfers(engine: EngineCore, shape: Shape, threads: int) -> Iterator[list[int]]:
    """Threads that write random bytes to blocks of their own and read them back, until the end of
    the block. Yields a list that has, after the block, how many blocks each has moved, or -1 if it
    read other bytes than it wrote."""
    blocks_each = 8
    layout, counts = engine.info.layout, [0] * threads
    stop = threading.Event()
    reservations = []
    for thread in range(threads):
        [prompt] = random_prompts(1, blocks_each * layout.block_size, shape.vocab, seed=thread + 50)
        [request] = requests_of([prompt], GREEDY, name=f"moved {thread} ")
        reservation = engine.reserve(request)
        assert reservation is not None, "the pool is full"
        reservations.append(reservation)

    def move(thread: int, blocks: Sequence[BlockId]) -> None:
        draw = np.random.default_rng(thread)
        size = len(blocks) * layout.block_bytes
        sent = [draw.integers(0, 256, size, np.uint8) for _ in range(2)]
        into = np.zeros(size, np.uint8)
        for data in cycle(sent):
            if stop.is_set():
                return
            engine.memory.write(blocks, data.data)
            engine.memory.read(blocks, into.data)
            if not np.array_equal(into, data):  # like the transfers, it lets other threads run
                counts[thread] = -1
                return
            counts[thread] += len(blocks)

    movers = [
        threading.Thread(target=move, args=(number, each.blocks))
        for number, each in enumerate(reservations)
    ]
    for mover in movers:
        mover.start()
    try:
        yield counts
    finally:
        stop.set()
        for mover in movers:
            mover.join()
        for reservation in reservations:
            engine.release(reservation)
