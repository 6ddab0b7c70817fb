"""The part `ablations`: what each choice of the engine is worth.

In: the device and the card's bounds. Out: decode steps without graphs, without overlap and with
larger blocks; the kernel of one-token attention with other tiles and splits; the filters of
sampling alone; and the gaps between tokens while another engine on the same card computes prompts.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.synchronize import Event
from typing import Any

import msgspec
import torch

from baton_engine.build import ops_for
from baton_engine.interface import Sample
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.sampling.metadata import draws_of
from baton_protocol.sampling import SamplingParams
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.in_order import Task, reach, run_in_order
from benchmarks.gpu.names import COPY
from benchmarks.gpu.shapes import GIB, Shape
from benchmarks.gpu.stepping import (
    GREEDY,
    QWEN3_DEFAULTS,
    complete,
    generating,
    random_prompts,
    requests_of,
    step_ms,
)
from benchmarks.gpu.timing import seconds_per_call
from benchmarks.support.figures import percentile
from tests.support.engines.small_pool import kv_of

# The goal of the attention kernel: its share of the copy bandwidth.
ATTENTION_SHARE = 0.8
LAYERS = 4  # read in turn, so that few rows do not find their KV in the device's cache
LOAD_PATIENCE_S = 60.0
LOAD_PROMPT = 2048

VARIANTS: Mapping[str, dict[str, Any]] = {
    "as by default": {},
    "no graphs": {"enforce_eager": True},
    "no overlap": {"overlap": "off"},
    "blocks of 32": {"block_size": 32},
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured: on a card, and in a dry run."""

    rows: Sequence[int] = (1, 256)
    context: int = 512
    steps: int = 24
    # Rows and keys of the attention kernel, and of the splits of few rows.
    attention: Sequence[tuple[int, int]] = ((256, 1024), (64, 1024))
    splits: Sequence[tuple[int, int]] = ((1, 4096), (8, 4096))
    programs: Sequence[int] = (1, 2, 4, 8, 16, 32)
    stages: Sequence[int] = (4, 5, 6)
    keys: Sequence[int] = (32, 64)
    warps: Sequence[int] = (2, 4)
    filtered: Sequence[int] = (1, 256)
    vocab: int = 151_936
    gaps: int = 200
    gap_rows: int = 32


DRY = Sizes(
    rows=(1, 4),
    context=16,
    steps=2,
    attention=((2, 40),),
    splits=((1, 300),),
    programs=(1, 2),
    stages=(5,),
    keys=(32,),
    warps=(2, 4),
    filtered=(1, 2),
    vocab=3000,
    gaps=20,
    gap_rows=2,
)


def run(findings: Findings) -> None:
    part = Ablations(findings, DRY if findings.dry else Sizes())
    run_in_order(
        findings,
        [
            Task("attention alone", 4, part.attention),
            Task("filters alone", 4, part.filters),
            Task("tiles of attention", 14, part.tiles),  # most of it compiles
            Task("variants of the engine", 8, part.variants, group=True),
            Task("splits of attention", 8, part.splits),
            Task("two engines on one device", 20, part.two_engines),
        ],
    )


@dataclass(frozen=True)
class Ablations:
    findings: Findings
    sizes: Sizes

    @property
    def shape(self) -> Shape:
        return Shape(self.findings, "qwen3-0.6b")

    # --- engines ----------------------------------------------------------------------------------

    def variants(self) -> None:
        usual: dict[int, float] = {}
        tasks = [Task(name, 5, partial(self.variant, name, usual)) for name in VARIANTS]
        run_in_order(self.findings, tasks)

    def variant(self, name: str, usual: dict[int, float]) -> None:
        """Decode steps of an engine that differs from the default in one point. `usual` has those
        of the default, which comes first."""
        changes = {"overlap": "on", "kv_memory": 24 * GIB, **VARIANTS[name]}
        with self.shape.engine(**changes) as engine:
            for rows in reversed(self.sizes.rows):
                prompts = random_prompts(rows, self.sizes.context, self.shape.vocab)
                with generating(engine, requests_of(prompts, GREEDY)):
                    found = step_ms(engine, self.sizes.steps)
                if not VARIANTS[name]:
                    usual[rows] = found
                self.findings.measured(
                    *(f"decode step, {rows} rows, context {self.sizes.context}, {name}", found),
                    "ms",
                    share=usual[rows] / found if rows in usual else None,
                    of="the speed by default" if rows in usual else "",
                )

    # --- kernels ----------------------------------------------------------------------------------

    def attention(self) -> None:
        """The kernel of one-token rows, as the engine launches it."""
        for rows, keys in self.sizes.attention:
            name = f"one-token attention, {rows} rows of {keys} keys"
            speed = Case.of(self.shape, rows, keys).gb_per_s()
            self.findings.measured(name, speed, "GB/s")
            if self.findings.ceilings.get(COPY):
                share = speed / self.findings.ceilings[COPY]
                reach(self.findings, f"{name}: share of {COPY}", share, "", ATTENTION_SHARE)

    def tiles(self) -> None:
        """The same with other tiles, for the largest case."""
        from baton_engine.attention.triton_paged_attention import OneTokenTile

        rows, keys = self.sizes.attention[0]
        case = Case.of(self.shape, rows, keys)
        usual = case.gb_per_s()
        for stages, of_keys, warps in product(self.sizes.stages, self.sizes.keys, self.sizes.warps):
            tile = OneTokenTile(keys=of_keys, stages=stages, warps=warps)
            name = f"one-token attention, {stages} stages, {of_keys} keys, {warps} warps"
            with self.findings.attempt(name):  # a tile may need too much shared memory
                found = case.gb_per_s(tile=tile)
                self.findings.measured(
                    name, found, "GB/s", share=found / usual, of="the tile by default"
                )

    def splits(self) -> None:
        """Keys of few rows, divided among several programs."""
        for rows, keys in self.sizes.splits:
            case = Case.of(self.shape, rows, keys)
            for programs in self.sizes.programs:
                found = case.seconds(programs=programs) * 1e6
                label = f"one-token attention, {rows} rows of {keys} keys, {programs} programs each"
                note = "as by default" if programs == case.programs else ""
                self.findings.measured(label, found, "us", note=note)

    def filters(self) -> None:
        """Draws with Qwen3's own top-k and top-p, beside draws with neither."""
        device, ops = self.findings.device, ops_for("triton")
        plain = msgspec.structs.replace(QWEN3_DEFAULTS, top_k=-1, top_p=1.0)
        cases = {
            "none": plain,
            "top-k 20": msgspec.structs.replace(plain, top_k=20),
            "top-p 0.95": msgspec.structs.replace(plain, top_p=0.95),
            "top-k 20 and top-p 0.95": QWEN3_DEFAULTS,
        }
        for rows in self.sizes.filtered:
            noise = torch.Generator(device).manual_seed(0)
            shape = rows, self.sizes.vocab
            logits_SV = 3 * torch.randn(*shape, device=device, generator=noise)
            for name, params in cases.items():
                found = self._draw_ms(ops.draw, logits_SV, params)
                self.findings.measured(f"sampling, {rows} rows, filter: {name}", found, "ms")

    def _draw_ms(
        self,
        draw: Callable[..., torch.Tensor],
        logits_SV: torch.Tensor,
        params: SamplingParams,
    ) -> float:
        samples = [Sample(0, 100 + row, params) for row in range(len(logits_SV))]
        draws = draws_of(samples, logits_SV.device)
        return 1e3 * seconds_per_call(lambda: draw(logits_SV, draws), logits_SV.device)

    # --- two processes ----------------------------------------------------------------------------

    def two_engines(self) -> None:
        """The gaps between tokens of one engine, while another one on the device is idle and while
        it computes prompts."""
        with (
            prompts_of_another(self.shape) as computes,
            self.shape.engine(kv_memory=8 * GIB, max_num_seqs=64) as engine,
        ):
            prompts = random_prompts(self.sizes.gap_rows, self.sizes.context, self.shape.vocab)
            for label in ("is idle", "computes prompts"):
                if label == "computes prompts":
                    computes.set()
                    time.sleep(0.5)
                gaps = []
                with generating(engine, requests_of(prompts, GREEDY)):
                    for _ in range(self.sizes.gaps):
                        began = time.perf_counter()
                        engine.step()
                        gaps.append((time.perf_counter() - began) * 1e3)
                name = f"gap between tokens, {len(prompts)} rows, another engine {label}"
                note = f"p99 {percentile(gaps, 0.99):.1f} ms, longest {max(gaps):.1f} ms"
                self.findings.measured(name, statistics.median(gaps), "ms", note=note)


@dataclass(frozen=True)
class Case:
    """One-token rows with random KV in blocks at random places. `programs` is what the backend
    chooses for them."""

    memory: TorchMemory
    q_TNH: torch.Tensor
    table_RM: torch.Tensor
    keys: int
    programs: int

    @classmethod
    def of(cls, shape: Shape, rows: int, keys: int) -> Case:
        from baton_engine.attention.triton_paged_attention import programs_for

        device = shape.findings.device
        size = shape.layout.block_size
        blocks = -(-keys // size)
        layout = msgspec.structs.replace(shape.layout, num_layers=LAYERS)
        memory = TorchMemory(layout, rows * blocks, device)
        kv_of(memory).normal_()
        heads, dim = shape.config.num_heads, shape.config.head_dim
        q_TNH = torch.randn(rows, heads, dim, device=device).to(kv_of(memory).dtype)
        places = random.Random(0).sample(range(1, rows * blocks + 1), rows * blocks)
        table_RM = torch.tensor(places, dtype=torch.int32, device=device).view(rows, blocks)
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        programs = programs_for(rows, layout.num_kv_heads, keys, processors)
        return cls(memory, q_TNH, table_RM, keys, programs)

    def seconds(self, **changes: Any) -> float:
        """Seconds of one layer. `changes` are further arguments of paged_attention()."""
        from baton_engine.attention.layer_kv import LayerKV
        from baton_engine.attention.triton_paged_attention import StepRows, paged_attention

        rows, device = len(self.q_TNH), self.q_TNH.device
        starts_R1 = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lengths_R = torch.full((rows,), self.keys, dtype=torch.int32, device=device)
        paged = StepRows(starts_R1, lengths_R, self.table_RM, one_token=True)
        out_TNH = torch.empty_like(self.q_TNH)
        arguments = {"programs": self.programs, **changes}

        def all_layers() -> None:
            for layer in range(LAYERS):
                kv = LayerKV(*(self.memory.fields[name][:, layer] for name in ("k", "v")))
                paged_attention(self.q_TNH, kv, paged, out_TNH, **arguments)

        return seconds_per_call(all_layers, device) / LAYERS

    def gb_per_s(self, **changes: Any) -> float:
        """The speed at which K and V are read."""
        layout = self.memory.layout
        token_bytes = sum(field.token_bytes for field in layout.kv_fields)
        size = len(self.q_TNH) * self.keys * token_bytes
        return size / self.seconds(**changes) / 1e9


@contextmanager
def prompts_of_another(shape: Shape) -> Iterator[Event]:
    """A process with an engine of its own, ready. When the event is set it computes prompts, one
    after the other, until the end of the block."""
    start = multiprocessing.get_context("spawn")
    ready, computes, ends = start.Event(), start.Event(), start.Event()
    process = start.Process(
        target=compute_prompts, args=(shape, ready, computes, ends), daemon=True
    )
    process.start()
    try:
        until = time.monotonic() + LOAD_PATIENCE_S
        while not ready.wait(0.2):
            if process.exitcode is not None or time.monotonic() > until:
                raise RuntimeError(f"the other engine did not start: {process.exitcode}")
        yield computes
    finally:
        ends.set()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def compute_prompts(shape: Shape, ready: Event, computes: Event, ends: Event) -> None:
    """The other process."""
    torch.set_num_threads(1)
    length = 32 if shape.findings.dry else LOAD_PROMPT
    params = msgspec.structs.replace(GREEDY, max_tokens=1)
    with shape.engine(kv_memory=4 * GIB, max_num_seqs=8) as engine:
        for number in range(1_000_000):
            if ends.is_set():
                return
            if number == 1:  # kernels are compiled
                ready.set()
                while not (computes.wait(0.2) or ends.is_set()):
                    pass
            [prompt] = random_prompts(1, length, shape.vocab)
            complete(engine, requests_of([prompt], params, salt=str(number)))
