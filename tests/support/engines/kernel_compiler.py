"""Compiles the kernels for A100 (sm_80), H100 (sm_90) and B200 (sm_100), without a GPU.

Kernels are launched by the functions that the engine calls, and compiled with the arguments of
these launches: triton compiles another variant for an argument that is 1 or a multiple of 16, and
its interpreter accepts code that the compiler rejects. This is a separate process, because triton
is either an interpreter or a compiler. Out: for each variant its registers per thread, the bytes
per thread that do not fit them (spills), and the bytes of shared memory per program. A kernel that
does not compile ends the process with the compiler's error.

    python -m tests.support.engines.kernel_compiler           all cases on all devices, in minutes
    python -m tests.support.engines.kernel_compiler --quick   each kernel on one device
    ... --json                                                for tests, instead of a table
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
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
from baton_engine.interface import Row, Sample
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_engine.layers.rotary import HeadNorm, Rope
from baton_engine.layers.triton_matmul import FIXED_TILE, FIXED_TILE_HEAD, LEAST_TILES, WIDTHS
from baton_engine.runner.input_buffers import StepShape, pad, to_device
from baton_engine.sampling.metadata import draws_of
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams
from tests.support.engines.attention_specs import batch_of
from tests.support.engines.demands import kv_layout

ARCHITECTURES = (80, 90, 100)
CPU = torch.device("cpu")
OPS = ops_for("triton")
HEADS, KV_HEADS, BLOCK = 16, 8, 16
# A step of one decode row, whose launches have arguments equal to 1, and a mixed step.
STEPS = [
    [Row([0], 300, [BlockId(1)] * 19)],
    [Row([0], 20, [BlockId(1)] * 2), Row([0] * 40, 16, [BlockId(2)] * 4)],
]
PADDED = 8  # rows of a padded step, whose inputs stay at the same addresses
PROGRAMS = 8  # that share a row's keys


@dataclass(frozen=True)
class Compiled:
    """A variant of a kernel. `registers` and `spills` (bytes) are per thread, `shared` (bytes) per
    program. `fused` counts multiply-adds in float32, `layouts` are those of tensor cores' results:
    variants must not differ in either if their results are to have the same bits."""

    kernel: str
    case: str
    arch: int
    registers: int
    spills: int
    shared: int
    fused: int
    layouts: list[str]


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


def attend(dtype: str, dim: int, limits: dict[str, Any], exact: bool) -> None:
    """Rope, the store of K and V, and attention over decode rows, a mixed and a padded step."""
    kind = TORCH_DTYPES[dtype]
    memory = TorchMemory(kv_layout(heads=KV_HEADS, dim=dim, block=BLOCK, dtype=dtype), 3, CPU)
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim, scale=dim**-0.5, **limits
    )
    attention = TritonAttention(memory, [spec], exact=exact)
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
        OPS.attend(heads, HEADS, norm, tables, 0, step)
        step.attend(0, *torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1))


def small_operations() -> None:
    x = torch.zeros(3, 4096, dtype=torch.bfloat16)
    OPS.add_norm(x, None, x[0], 1e-6)
    OPS.add_norm(x, x, x[0], 1e-6)
    OPS.add_norm(x, x, torch.zeros(4096), 1e-6)  # a weight in float32
    OPS.silu_mul(x)
    OPS.gelu_tanh_mul(x)
    tokens = torch.zeros(3, dtype=torch.int32)
    OPS.put_sampled(tokens, tokens, torch.zeros(3, dtype=torch.int64))


def sample() -> None:
    for vocab in (1000, 151_936):
        logits = torch.zeros(1, vocab)
        for params in (SamplingParams(), SamplingParams(top_k=5, top_p=0.9, min_p=0.1)):
            OPS.draw(logits, draws_of([Sample(0, 0, params)], CPU))


def multiply(dtype: str) -> None:
    """Products with tiles of all widths, and with a last part of the inputs."""
    kind = TORCH_DTYPES[dtype]
    for outputs, inputs in [*((LEAST_TILES * width, 128) for width in WIDTHS), (100, 80)]:
        weight, x = torch.zeros(outputs, inputs, dtype=kind), torch.zeros(1, inputs, dtype=kind)
        FIXED_TILE.product(weight, torch.zeros(outputs, dtype=kind))(x)
    FIXED_TILE_HEAD.product(weight, None)(x)


LIMITS: dict[str, dict[str, Any]] = {"": {}, ", limited": {"window": 4096, "soft_cap": 50.0}}
CASES: dict[str, Callable[[], None]] = {
    f"{dtype}, head_dim {dim}{limits}{', exact' if exact else ''}": partial(
        attend, dtype, dim, LIMITS[limits], exact
    )
    for dtype, dim, limits, exact in product(
        ("bfloat16", "float32"), (64, 128, 256), LIMITS, (False, True)
    )
} | {
    "norms and activations": small_operations,
    "sampling": sample,
    "products in bfloat16": partial(multiply, "bfloat16"),
    "products in float32": partial(multiply, "float32"),
}
QUICK = {
    "bfloat16, head_dim 128, exact": 90,
    "bfloat16, head_dim 64, limited": 80,
    "float32, head_dim 64, limited, exact": 100,
    "norms and activations": 90,
    "sampling": 80,
    "products in bfloat16": 100,
}


def compile_all(cases: Iterable[tuple[str, int]]) -> Iterator[Compiled]:
    """Compile the cases, each given by its name and its architecture."""
    found: list[Compiled] = []
    gpu, run = AbsentGpu(), JITFunction.run
    name = ""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        used = re.search(r"(\d+) bytes spill stores[\s\S]*Used (\d+) registers", log.getvalue())
        if used is not None:  # else it was compiled before
            found.append(
                Compiled(
                    kernel=self.__name__,
                    case=name,
                    arch=gpu.arch,
                    registers=int(used[2]),
                    spills=int(used[1]),
                    shared=int(kernel.metadata.shared),
                    fused=len(re.findall(r"fma\.[\w.]*f32", kernel.asm["ptx"])),
                    layouts=sorted(re.findall(r"= (#ttg\.nvidia_mma<.*>)", kernel.asm["ttgir"])),
                )
            )
        return kernel

    driver.set_active(gpu)
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(triton_backend, "programs_for", return_value=PROGRAMS),
    ):
        for name, gpu.arch in cases:
            CASES[name]()
            yield from found
            found.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = list(QUICK.items()) if options.quick else [*product(CASES, ARCHITECTURES)]
    found = compile_all(cases)
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    print(f"{'kernel':18}{'case':40}{'arch':>7}{'registers':>11}{'spills':>8}{'shared':>8}")
    for each in found:
        numbers = f"{each.registers:11}{each.spills:8}{each.shared:8}"
        print(f"{each.kernel:18}{each.case:40}{'sm_' + str(each.arch):>7}{numbers}", flush=True)


if __name__ == "__main__":
    main()
