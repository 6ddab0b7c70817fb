"""Compiles kernels with the arguments of real launches, without a GPU.

triton's interpreter accepts code that the compiler rejects: types that differ between branches, or
an argument that happens to be 1 and so becomes a constant. This is a separate process, because
triton is either an interpreter or a compiler. Out, on stdout: the names of the compiled kernels. A
kernel that does not compile ends the process with the compiler's error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton_engine.attention.interface import StepBatch
from baton_engine.attention.triton_backend import TritonAttention
from baton_engine.build import ops_for
from baton_engine.config.model_config import AttentionSpec, RopeConfig
from baton_engine.interface import Row, Sample
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers.rotary import HeadNorm, Rope
from baton_engine.runner.input_buffers import StepShape, pad, to_device
from baton_engine.sampling.metadata import draws_of
from baton_protocol.ids import BlockId
from baton_protocol.sampling import SamplingParams
from tests.support.engines.attention_specs import batch_of
from tests.support.engines.demands import kv_layout

CPU, BF16 = torch.device("cpu"), torch.bfloat16
N, K, H, LAYERS = 16, 8, 128, 2
# A step of one decode row, whose launches have arguments equal to 1, and a mixed step.
STEPS = [
    [Row([0], 300, [BlockId(1)] * 19)],
    [Row([0], 20, [BlockId(1)] * 2), Row([0] * 40, 16, [BlockId(2)] * 4)],
]


PADDED = 8  # rows of a padded step, whose inputs stay at the same addresses


class AbsentGpu:
    """The parts of a driver that triton calls before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    compiled: set[str] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.add(self.__name__)
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    driver.set_active(AbsentGpu())
    launch_all()
    print(" ".join(sorted(compiled)))


def launch_all() -> None:
    ops = ops_for("triton")
    layout = kv_layout(layers=LAYERS, heads=K, dim=H, block=16, dtype="bfloat16")
    memory = TorchMemory(layout, 3, CPU)
    spec = AttentionSpec(num_heads=N, num_kv_heads=K, head_dim=H, scale=H**-0.5)
    attention = TritonAttention(memory, [spec, replace(spec, window=16, soft_cap=50.0)])
    rope = Rope(RopeConfig(type="default", theta=1e6), H, BF16, CPU)
    norm = HeadNorm(torch.ones(N + K, H, dtype=BF16), 1e-6)
    shape = StepShape(PADDED, PADDED, 20, 1)
    host = shape.arrays_in(np.zeros(shape.size, np.int32))
    pad(host, 0)
    padded = StepBatch(host, to_device(host, CPU), 1, 320)
    for batch in [*(batch_of(rows, layout) for rows in STEPS), padded]:
        tokens, step = len(batch.host.tokens_T), attention.begin(batch)
        tables = rope.tables(torch.arange(tokens))
        heads = torch.zeros(tokens, N + 2 * K, H, dtype=BF16)
        for layer in range(LAYERS):
            ops.attend(heads, N, norm if layer else None, tables, layer, step)
        x = torch.zeros(tokens, 1024, dtype=BF16)
        ops.add_norm(x, None, x[0], 1e-6)
        ops.add_norm(x, x, x[0], 1e-6)
        ops.add_norm(x, x, torch.zeros(1024), 1e-6)  # a weight in float32
        ops.silu_mul(x)
        ops.gelu_tanh_mul(x)
    for vocab in (1000, 151_936):
        logits = torch.zeros(1, vocab)
        for params in (SamplingParams(), SamplingParams(top_k=5, top_p=0.9, min_p=0.1)):
            ops.draw(logits, draws_of([Sample(0, 0, params)], CPU))


if __name__ == "__main__":
    main()
