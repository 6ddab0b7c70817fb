"""Compiles the kernels for A100 (sm_80), H100 (sm_90) and B200 (sm_100), without a GPU.

Kernels are launched by the functions that the engine calls, and compiled with the arguments of
these launches: triton compiles another variant for an argument that is 1 or a multiple of 16, and
its interpreter accepts code that the compiler rejects. This is a separate process, because triton
is either an interpreter or a compiler. Out: for each variant its registers per thread, the bytes
per thread that do not fit them (spills), the bytes of shared memory per program, and how many tiles
of a loop are in shared memory at a time (depth): with one, a program waits for each load. Beside
them stand the bytes that a call moves and the fewest that it can (see `kernel_bytes`). A kernel
that does not compile ends the process with the compiler's error.

    python -m tests.support.engines.kernel_compiler           all cases on all devices, in minutes
    python -m tests.support.engines.kernel_compiler --quick   each kernel on one device
    ... --cache FOLDER                                        compile only what FOLDER lacks
    ... --arch 90                                             one device
    ... --json                                                for tests, instead of a table
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton_engine.attention import triton_backend
from baton_engine.attention.interface import StepBatch
from baton_engine.attention.triton_backend import TritonAttention
from baton_engine.build import ops_for
from baton_engine.config.model_config import AttentionSpec, RopeConfig
from baton_engine.config.quantization.scheme import BITS, Numbers
from baton_engine.interface import Row, Sample
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_engine.layers.experts import (
    ClampedSwiGLU,
    ExpertWeights,
    LoadedExperts,
    QuantizedExperts,
    Routes,
)
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight
from baton_engine.layers.rotary import HeadNorm, Rope
from baton_engine.layers.triton_matmul import FIXED_TILE, FIXED_TILE_HEAD
from baton_engine.layers.triton_quantized.products import QUANTIZED_TILE
from baton_engine.layers.triton_splits import STORED_ROWS
from baton_engine.runner.input_buffers import StepShape, pad, to_device
from baton_engine.sampling.metadata import draws_of
from baton_protocol.ids import BlockId
from baton_protocol.layout import CODES, LATENT, KVField, KVLayout
from baton_protocol.sampling import SamplingParams
from tests.support.engines.attention_specs import batch_of
from tests.support.engines.demands import kv_layout
from tests.support.engines.kernel_bytes import Shape, bytes_of, describe

ARCHITECTURES = (80, 90, 100)
CPU = torch.device("cpu")
OPS = ops_for("triton")
SHAPE = Shape()
HEADS, KV_HEADS, BLOCK = SHAPE.heads, SHAPE.kv_heads, SHAPE.block
# A step of one decode row, whose launches have arguments equal to 1, a mixed step and a prompt.
PROMPT = Row([0] * 40, 16, [BlockId(2)] * 4)
STEPS = [
    [Row([0], 300, [BlockId(1)] * 19)],
    [Row([0], 20, [BlockId(1)] * 2), PROMPT],
    [PROMPT],
]
PADDED = 8  # rows of a padded step, whose inputs stay at the same addresses
PROGRAMS = 8  # that share a row's keys
STEP_ROWS = (1, 256)  # of the steps whose bytes are counted
# A buffer of several tiles, which are read and filled in turn.
TILES = re.compile(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x\w+,.*mutable")


@dataclass(frozen=True)
class Compiled:
    """A variant of a kernel. `registers` and `spills` (bytes) are per thread, `shared` (bytes) per
    program. `depth` is the smallest number of tiles of a buffer in shared memory, 0 if there is
    none. `fused` counts multiply-adds in float32, `layouts` are those of tensor cores' results:
    variants must not differ in either if their results are to have the same bits. `moved` and
    `floor` are the bytes of a call with each of STEP_ROWS, None if it is not made."""

    kernel: str
    variant: str
    case: str
    arch: int
    registers: int
    spills: int
    shared: int
    depth: int
    fused: int
    layouts: list[str]
    moved: list[int | None]
    floor: list[int | None]


@dataclass(frozen=True)
class Case:
    """Calls that launch kernels, and the sizes that they have."""

    run: Callable[[], None]
    shape: Shape = field(default_factory=Shape)


class AbsentGpu:
    """The parts of a driver that triton calls before it compiles. Triton caches kernels per device,
    so each architecture is a device."""

    arch = ARCHITECTURES[0]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def attend(
    dtype: str, dim: int, limits: dict[str, Any], exact: bool, code: str | None = None
) -> None:
    """Rope, the store of K and V, and attention over decode rows, a mixed and a padded step."""
    kind = TORCH_DTYPES[dtype]
    layout = kv_layout(heads=KV_HEADS, dim=dim, block=BLOCK, dtype=dtype)
    memory = TorchMemory(layout if code is None else layout.in_dtype(code), 3, CPU)
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim, scale=dim**-0.5, **limits
    )
    attention = TritonAttention(memory, [spec], exact=exact)
    sinks_N = torch.zeros(HEADS) if spec.sinks else None
    rope = Rope(RopeConfig(type="default", theta=1e6), dim, kind, CPU)
    norm = HeadNorm(torch.ones(HEADS + KV_HEADS, dim, dtype=kind), 1e-6) if limits else None
    shape = StepShape(PADDED, PADDED, 20, 1)
    host = shape.arrays_in(np.zeros(shape.size, np.int32))
    pad(host, 0)
    padded = StepBatch(host, to_device(host, CPU), 1, 20 * BLOCK)
    for batch in [*(batch_of(rows, memory.layout) for rows in STEPS), padded]:
        tokens, step = len(batch.host.tokens_T), attention.begin(batch)
        tables = rope.tables(torch.arange(tokens))
        heads = torch.zeros(tokens, HEADS + 2 * KV_HEADS, dim, dtype=kind)
        OPS.attend(heads, HEADS, norm, tables, 0, step, sinks_N)
        qkv = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        step.attend(0, *qkv, sinks_N=sinks_N)


LATENT_SHAPES = {
    f"DeepSeek {name}": Shape(heads=heads, kv_heads=1, dim=576, value_dim=512, latent=True)
    for name, heads in (("V2-Lite", 16), ("V3", 128))
}


def attend_latent(dtype: str, shape: Shape, exact: bool) -> None:
    """Attention over latent rows, and their store."""
    field = KVField(LATENT, 1, shape.dim, dtype)
    layout = KVLayout.of_fields((field,), num_layers=1, block_size=BLOCK, chunk_blocks=1)
    spec = AttentionSpec(
        num_heads=shape.heads,
        num_kv_heads=1,
        head_dim=shape.dim,
        scale=0.1,
        value_dim=shape.value,
        latent=True,
    )
    attention = TritonAttention(TorchMemory(layout, 3, CPU), [spec], exact=exact)
    for rows in STEPS:
        batch = batch_of(rows, layout)
        tokens = len(batch.host.tokens_T)
        q, k = (
            torch.zeros(tokens, count, shape.dim, dtype=TORCH_DTYPES[dtype])
            for count in (shape.heads, 1)
        )
        attention.begin(batch).attend(0, q, k, None)


def small_operations(shape: Shape) -> None:
    x = torch.zeros(3, shape.hidden, dtype=torch.bfloat16)
    OPS.add_norm(x, None, x[0], 1e-6)
    OPS.add_norm(x, x, x[0], 1e-6)
    OPS.add_norm(x, x, torch.zeros(shape.hidden), 1e-6)  # a weight in float32
    gate_up = torch.zeros(3, 2 * shape.mlp, dtype=torch.bfloat16)
    OPS.silu_mul(gate_up)
    OPS.gelu_tanh_mul(gate_up)
    tokens = torch.zeros(3, dtype=torch.int32)
    OPS.put_sampled(tokens, tokens, torch.zeros(3, dtype=torch.int64))


def sample(vocab: int) -> None:
    logits = torch.zeros(1, vocab)
    for params in (SamplingParams(), SamplingParams(top_k=5, top_p=0.9, min_p=0.1)):
        OPS.draw(logits, draws_of([Sample(0, 0, params)], CPU))


# Outputs and inputs of products. Those with a bias have a last part of the inputs.
QWEN = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
WIDTHS = [(1024, 2048), (8192, 1024)]
BIASED = [(100, 80), (100, 1100)]
HEAD = (151_936, 1024)


def multiply(dtype: str, sizes: list[tuple[int, int]]) -> None:
    """Products whose splits are stored, and whose splits a program adds."""
    kind = TORCH_DTYPES[dtype]
    for outputs, inputs in sizes:
        weight = torch.zeros(outputs, inputs, dtype=kind)
        bias = torch.zeros(outputs, dtype=kind) if (outputs, inputs) in BIASED else None
        for rows in (1, STORED_ROWS + 1):
            FIXED_TILE.product(weight, bias)(torch.zeros(rows, inputs, dtype=kind))
    head, x = torch.zeros(*HEAD, dtype=kind), torch.zeros(1, HEAD[1], dtype=kind)
    FIXED_TILE_HEAD.product(head, None)(x)


@dataclass(frozen=True)
class Kind:
    """A kind of quantized weights; `group` 0: one scale per output."""

    numbers: Numbers
    group: int = 0
    shifted: bool = False
    activations: Numbers | None = None

    def weight(self, *shape: int) -> QuantizedWeight:
        *outputs, inputs = shape
        codes = torch.zeros(*outputs, inputs * BITS[self.numbers] // 8, dtype=torch.uint8)
        if self.numbers == "int8":
            codes = codes.view(torch.int8)
        group = self.group or inputs
        scales = torch.zeros(*outputs, -(-inputs // group))
        shifts = scales if self.shifted else None
        return QuantizedWeight(
            *(self.numbers, codes, scales, group, inputs, shifts), activations=self.activations
        )


KINDS = {
    "int4 by 128": Kind("int4", 128),
    "int4 by 32, shifted": Kind("int4", 32, shifted=True),
    "int8": Kind("int8", activations="int8"),
    "fp8 by 128": Kind("fp8", 128),
    "fp4 by 16": Kind("fp4", 16),
    "nf4 by 64": Kind("nf4", 64),
}


def multiply_quantized(dtype: str, kind: Kind, sizes: list[tuple[int, int]]) -> None:
    """Steps with each tile."""
    for outputs, inputs in sizes:
        product = QUANTIZED_TILE.product(kind.weight(outputs, inputs), None)
        for rows in (1, 64, STORED_ROWS + 1):
            product(torch.zeros(rows, inputs, dtype=TORCH_DTYPES[dtype]))


@dataclass(frozen=True)
class Mixture:
    hidden: int
    size: int
    experts: int
    chosen: int
    clamped: ClampedSwiGLU | None = None  # with biases


QWEN_MOE = Mixture(2048, 768, 128, 8)  # Qwen3-30B-A3B
GPT_OSS = Mixture(2880, 2880, 32, 4, ClampedSwiGLU(1.702, 7.0))


def compute_experts(dtype: str, mixture: Mixture, kind: Kind | None = None) -> None:
    """A decode step of one row, and a prompt."""
    numbers = partial(torch.empty, dtype=TORCH_DTYPES[dtype])
    experts, hidden, size = mixture.experts, mixture.hidden, mixture.size
    biased = mixture.clamped is not None
    biases = (
        numbers(experts, 2 * size) if biased else None,
        numbers(experts, hidden) if biased else None,
    )
    shapes = (experts, 2 * size, hidden), (experts, hidden, size)
    weights: LoadedExperts
    if kind is None:
        plain = numbers(*shapes[0]), numbers(*shapes[1])
        weights = ExpertWeights(*plain, *biases, mixture.clamped)
    else:
        quantized = kind.weight(*shapes[0]), kind.weight(*shapes[1])
        weights = QuantizedExperts(*quantized, *biases, mixture.clamped)
    packed = OPS.pack_experts(weights)
    for tokens in (1, 256):
        ids = torch.zeros(tokens, mixture.chosen, dtype=torch.int64)
        OPS.experts(numbers(tokens, hidden), Routes(ids, torch.zeros(ids.shape)), packed)


LIMITS: dict[str, dict[str, Any]] = {"": {}, ", limited": {"window": 4096, "soft_cap": 50.0}}
SINKS: dict[str, Any] = {"window": 128, "sinks": True}
HEADS_OF_64 = Shape(dim=64)
WIDE = Shape(hidden=4096, mlp=12_288)
CASES = (
    {
        f"{dtype}, head_dim {dim}{limits}{', exact' if exact else ''}": Case(
            partial(attend, dtype, dim, LIMITS[limits], exact),
            Shape(dim=dim, item=TORCH_DTYPES[dtype].itemsize),
        )
        for dtype, dim, limits, exact in product(
            ("bfloat16", "float32"), (64, 128, 256), LIMITS, (False, True)
        )
    }
    | {
        f"latent rows of {name}{', exact' if exact else ''}": Case(
            partial(attend_latent, "bfloat16", shape, exact), shape
        )
        for name, shape in LATENT_SHAPES.items()
        for exact in (False, True)
    }
    | {
        f"bfloat16, head_dim 64, sinks{', exact' if exact else ''}": Case(
            partial(attend, "bfloat16", 64, SINKS, exact), HEADS_OF_64
        )
        for exact in (False, True)
    }
    | {
        f"bfloat16, head_dim 128, KV in {code}{', exact' if exact else ''}": Case(
            partial(attend, "bfloat16", 128, {}, exact, code)
        )
        for code in CODES
        for exact in (False, True)
    }
    | {
        f"quantized products, {name}": Case(
            partial(multiply_quantized, "bfloat16", kind, [(1024, 2048)])
        )
        for name, kind in KINDS.items()
    }
    | {
        "bfloat16, head_dim 64, limited, sinks": Case(
            partial(attend, "bfloat16", 64, LIMITS[", limited"] | SINKS, False), HEADS_OF_64
        ),
        "norms and activations": Case(partial(small_operations, SHAPE)),
        "norms and activations of Qwen3-8B": Case(partial(small_operations, WIDE), WIDE),
        "sampling": Case(partial(sample, 151_936)),
        "sampling of 1,000 ids": Case(partial(sample, 1000)),
        "products of Qwen3-0.6B": Case(partial(multiply, "bfloat16", QWEN)),
        "products in bfloat16": Case(partial(multiply, "bfloat16", [*WIDTHS, *BIASED])),
        "products in float32": Case(
            partial(multiply, "float32", [*WIDTHS, *BIASED]), Shape(item=4)
        ),
        "experts of Qwen3-30B-A3B": Case(partial(compute_experts, "bfloat16", QWEN_MOE)),
        "experts of gpt-oss-20b": Case(
            partial(compute_experts, "bfloat16", GPT_OSS), Shape(chosen=GPT_OSS.chosen)
        ),
        "quantized products of Qwen3-0.6B": Case(
            partial(multiply_quantized, "bfloat16", KINDS["int4 by 128"], QWEN)
        ),
        "quantized products in float32": Case(
            partial(multiply_quantized, "float32", KINDS["int4 by 128"], [(1024, 2048)]),
            Shape(item=4),
        ),
        "MXFP4 experts of gpt-oss-20b": Case(
            partial(compute_experts, "bfloat16", GPT_OSS, Kind("fp4", 32)),
            Shape(chosen=GPT_OSS.chosen),
        ),
        "experts in float32": Case(partial(compute_experts, "float32", QWEN_MOE), Shape(item=4)),
    }
)
# Attention takes most of the time, so only one of the exact and one of the other cases.
QUICK = {
    "bfloat16, head_dim 128, exact": 90,
    "bfloat16, head_dim 64, limited, sinks": 90,
    "latent rows of DeepSeek V3": 90,
    "norms and activations of Qwen3-8B": 80,
    "sampling": 80,
    "products in bfloat16": 100,
    "experts of gpt-oss-20b": 90,
    "quantized products, int4 by 32, shifted": 90,
    "MXFP4 experts of gpt-oss-20b": 80,
}


class Compiler:
    """Compiles kernels with the log of ptxas. With a `folder`, it takes from there what an earlier
    process has compiled: triton names a variant by its source with all that it calls, its arguments
    and options, and the compiler. Each log stands beside its variant."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._run = JITFunction.run
        self._seen: list[Any] = []
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = folder is None
        if folder is not None:
            triton.knobs.cache.dir = str(folder)

    def compile(self, function: Any, *args: Any, **options: Any) -> tuple[Any, str]:
        """Return the kernel and its log, which is empty if this process has had it before."""
        kernel, log = self._compile(function, *args, **options)
        if any(kernel is each for each in self._seen):
            return kernel, ""
        place = self._place(kernel) / "ptxas.log"
        if log:
            place.write_text(log)
        elif not place.is_file():  # a process ended between the two
            shutil.rmtree(place.parent)
            function.device_caches.clear()
            return self.compile(function, *args, **options)
        self._seen.append(kernel)
        return kernel, place.read_text()

    def _compile(self, function: Any, *args: Any, **options: Any) -> tuple[Any, str]:
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = self._run(function, *args, **options, warmup=True)
        return kernel, log.getvalue()

    def drop_unused(self) -> None:
        """Remove what sources of before have left in the folder."""
        used = {self._place(kernel) for kernel in self._seen}
        for place in self._folder.iterdir() if self._folder else ():
            if place not in used:
                shutil.rmtree(place, ignore_errors=True)

    @staticmethod
    def _place(kernel: Any) -> Path:
        return Path(next(iter(kernel.metadata_group.values()))).parent


def compile_all(cases: Iterable[tuple[str, int]], folder: Path | None = None) -> Iterator[Compiled]:
    """Compile the cases, each given by its name and its architecture. `folder`: see Compiler."""
    found: list[Compiled] = []
    gpu, compiler = AbsentGpu(), Compiler(folder)
    name = ""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel, log = compiler.compile(self, *args, grid=grid, **options)
        used = re.search(r"(\d+) bytes spill stores[\s\S]*Used (\d+) registers", log)
        if used is not None:  # else it was compiled before
            counts = [
                bytes_of(self.__name__, CASES[name].shape, rows, options) for rows in STEP_ROWS
            ]
            found.append(
                Compiled(
                    kernel=self.__name__,
                    variant=describe(self.__name__, options),
                    case=name,
                    arch=gpu.arch,
                    registers=int(used[2]),
                    spills=int(used[1]),
                    shared=int(kernel.metadata.shared),
                    depth=min(map(int, TILES.findall(kernel.asm["ttgir"])), default=0),
                    fused=len(re.findall(r"fma\.[\w.]*f32", kernel.asm["ptx"])),
                    layouts=sorted(re.findall(r"= (#ttg\.nvidia_mma<.*>)", kernel.asm["ttgir"])),
                    moved=[None if each is None else each.moved for each in counts],
                    floor=[None if each is None else each.floor for each in counts],
                )
            )
        return kernel

    driver.set_active(gpu)
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(triton_backend, "programs_for", return_value=PROGRAMS),
    ):
        for name, gpu.arch in cases:
            CASES[name].run()
            yield from found
            found.clear()
    compiler.drop_unused()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = list(QUICK.items()) if options.quick else [*product(CASES, ARCHITECTURES)]
    found = compile_all(
        ((name, arch) for name, arch in cases if options.arch is None or arch == options.arch),
        options.cache,
    )
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    print(CAPTION)
    print("| " + " | ".join(f"{name:<{width}}" for name, width in COLUMNS.items()) + " |")
    print("|" + "|".join("-" * (width + 2) for width in COLUMNS.values()) + "|")
    for each in found:
        print(table_line(each), flush=True)


def table_line(each: Compiled) -> str:
    """A line of the Markdown table."""
    cells = [
        *(each.kernel, each.variant, each.case, f"sm_{each.arch}"),
        *(f"{number:,}" for number in (each.registers, each.spills, each.shared, each.depth)),
        *(
            "" if size is None else f"{size / 1000:,.1f}"
            for pair in zip(each.moved, each.floor, strict=True)
            for size in pair
        ),
    ]
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)]
    return "| " + " | ".join(padded) + " |"


# Columns of the table, and their widths.
COLUMNS = {
    **{"kernel": 15, "variant": 39, "case": 38, "arch": 6},
    **{"registers": 9, "spills": 6, "shared": 7, "depth": 5},
    **{"1 row: kB": 9, "floor": 9, "256 rows: kB": 12, "floor ": 11},
}
CAPTION = f"""
triton {triton.__version__}. Registers and spills (bytes) are per thread, shared memory (bytes) per
program. Depth: tiles of K and V, or of x and the weight, in shared memory. kB (1,000 bytes): bytes
that a call loads and stores, estimated, and below which it cannot go, for Qwen3-0.6B's sizes or
those that the case names, on 132 multiprocessors. Rows have 1,024 tokens, of which one is new. A
step with longer rows has one row with 256 new tokens; one with longer rows only has one of these,
or 256 with 8.
"""


if __name__ == "__main__":
    main()
