"""The parts of a decode step's time on a CPU.

    python -m benchmarks.engine.cpu_step [--rows 16] [--keys 256] [--shared 0] [--dtype bfloat16]
        [--batch-invariant on]

`--rows` requests generate after prompts of `--keys` random ids, of which the first `--shared` are
common to all. The model is the 116M-parameter one of `benchmarks.engine.cpu` with random weights.
The time of each part excludes the parts that it calls, so the parts add up to the step. The pass
with the median time is printed. For comparison, the same matrix products run alone on as many
weights in turn as there are layers, and a plain copy that reads and writes runs beside attention;
both run right after the steps, so changes of the machine in between are in the ratio. With
`--threads 1` all times are the thread's CPU time, which other programs disturb least.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton_engine.attention.exact.backend import TorchAttention, TorchStep
from baton_engine.attention.exact.pages import PagedKV
from baton_engine.build import build_torch
from baton_engine.config.engine_config import BatchInvariant, TorchSettings
from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import TokenOut
from baton_engine.kv.kv_pool import TORCH_DTYPES
from baton_engine.layers import ops
from baton_engine.layers.decoder_layers import Linear
from baton_engine.layers.rotary import Rope
from baton_engine.models.decoder import Decoder
from baton_engine.runner.model_runner import TorchRunner
from baton_protocol.ids import RequestId
from baton_protocol.policies import DType
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.support.engine.cpu_workloads import MID, TINY, VOCAB, Shape, write_config
from benchmarks.support.engine.part_timer import Clock, Name, PartTimer, noted
from benchmarks.support.figures import machine

BLOCK = 16
PROMPT_STEP = 256  # prompt tokens per step
COPY_BYTES = 256 << 20
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
WARM_STEPS = 4
HEAD = "head product"
ATTENTION = "attention"
HOST = ("schedule, update", "batch", "attention's tables")
PARTS = (
    "embedding",
    "norms",
    "qkv product",
    "rope, store",
    ATTENTION,
    "output product",
    "gate, up product",
    "silu, multiply",
    "down product",
    HEAD,
    "sampling",
    "rest of the model",
    *HOST,
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step computes: `rows` with `keys` keys each at the start, `shared` of them common."""

    rows: int
    keys: int
    shared: int


@dataclass(frozen=True)
class Profile:
    """Milliseconds of a step, in all and per part, and how many keys a row had on average."""

    whole_ms: float
    parts_ms: dict[str, float]
    keys: float


def product_shapes(shape: Shape) -> dict[str, tuple[int, int, int]]:
    """Outputs and inputs of each product, and how often a step has it."""
    heads, all_heads = shape.heads, shape.heads + 2 * shape.kv_heads
    return {
        "qkv product": (all_heads * shape.head_dim, shape.hidden, shape.layers),
        "output product": (shape.hidden, heads * shape.head_dim, shape.layers),
        "gate, up product": (2 * shape.mlp, shape.hidden, shape.layers),
        "down product": (shape.hidden, shape.mlp, shape.layers),
        HEAD: (VOCAB, shape.hidden, 1),
    }


def clock() -> Clock:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def make_engine(
    folder: Path,
    shape: Shape,
    load: Load,
    dtype: DType,
    steps: int,
    batch_invariant: BatchInvariant = "auto",
) -> tuple[EngineCore, int]:
    """An engine that has computed all prompts, what is common once, and can go `steps` on; and how
    many tokens its rows have generated meanwhile."""
    write_config(folder, shape)
    prompt_steps = load.rows * (2 + load.keys // PROMPT_STEP)
    new_tokens = prompt_steps + steps
    engine = build_torch(
        TorchSettings(
            model=folder,
            load_format="dummy",
            dtype=dtype,
            threads=torch.get_num_threads(),
            block_size=BLOCK,
            kv_blocks=load.rows * -(-(load.keys + new_tokens) // BLOCK),
            max_batched_tokens=PROMPT_STEP + load.rows,
            max_num_seqs=load.rows,
            batch_invariant=batch_invariant,
        )
    )
    draw = random.Random(0)
    common = [draw.randrange(VOCAB) for _ in range(load.shared)]
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    generated = 0
    for row in range(load.rows):
        own = [draw.randrange(VOCAB) for _ in range(load.keys - load.shared)]
        engine.submit(
            Request(
                id=RequestId(str(row)),
                attempt=0,
                prompt_ids=(*common, *own),
                params=params,
                outputs=((),),
            )
        )
        last = False
        while not last:  # others find its blocks only once they are full
            tokens = engine.step().tokens
            last = any(token.request == str(row) for token in tokens)
            generated += len(tokens)
    return engine, generated


def profile(
    engine: EngineCore, generated: int, shape: Shape, load: Load, steps: int, passes: int
) -> list[Profile]:
    """A profile per pass."""
    for _ in range(WARM_STEPS):
        engine.step()
    timer, found = PartTimer(clock()), []
    keys = load.keys + generated / load.rows + WARM_STEPS + steps / 2
    with noted(timer, _functions(shape)):
        for number in range(passes):
            tokens: list[TokenOut] = []
            for _ in range(steps):
                tokens += engine.step().tokens
            assert len(tokens) == load.rows * steps, (
                "a request ended during the pass, so its steps are not comparable"
            )
            spent = timer.take()
            parts = {part: spent.get(part, 0.0) * 1e3 / steps for part in PARTS}
            assert not spent.keys() - parts.keys(), f"parts missing from PARTS: {spent.keys()}"
            whole_ms = sum(spent.values()) * 1e3 / steps
            found.append(Profile(whole_ms, parts, keys + number * steps))
    return found


def _functions(shape: Shape) -> list[tuple[object, str, Name]]:
    """Who computes what: (owner, attribute, part)."""
    part_of = {sizes[:2]: part for part, sizes in product_shapes(shape).items() if part != HEAD}

    def product(linear: Linear) -> str:
        return part_of[linear.shape]

    return [
        (torch.nn.functional, "embedding", "embedding"),
        (ops.TorchOps, "add_norm", "norms"),
        (Linear, "__call__", product),
        (ops.TorchOps, "attend", "rope, store"),
        (Rope, "tables", "rope, store"),
        (PagedKV, "store", "rope, store"),
        (TorchStep, "attend", ATTENTION),
        (TorchStep, "attend", ATTENTION),
        (ops.TorchOps, "silu_mul", "silu, multiply"),
        (Decoder, "logits", HEAD),
        (ops.TorchOps, "draw", "sampling"),
        (Decoder, "forward", "rest of the model"),
        (EngineCore, "step", HOST[0]),
        (TorchRunner, "launch", HOST[1]),
        (TorchAttention, "begin", HOST[2]),
        (TorchAttention, "begin", HOST[2]),
    ]


def bare_gflops(outputs: int, inputs: int, count: int, rows: int, dtype: str) -> float:
    """Of the plain product, with `count` weights in turn, so that none is at hand in a cache."""
    item = TORCH_DTYPES[dtype]
    x_TI = torch.randn(rows, inputs).to(item)
    weights = [torch.randn(outputs, inputs).to(item) for _ in range(count)]

    def multiply() -> None:
        for weight_OI in weights:
            torch.nn.functional.linear(x_TI, weight_OI)

    return 2e-9 * rows * outputs * inputs * count / _seconds(multiply)


def copy_gbs() -> float:
    """Bytes read and written per second, in 10^9."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2e-9 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def _seconds(act: Callable[[], object]) -> float:
    times, now = [], clock()
    for _ in range(7):
        began = now()
        act()
        times.append(now() - began)
    return statistics.median(times)


def report(found: Profile, shape: Shape, load: Load, dtype: str) -> None:
    shapes = product_shapes(shape)
    for part, ms in found.parts_ms.items():
        beside = ""
        if part in shapes:
            outputs, inputs, count = shapes[part]
            rate = 2e-6 * load.rows * outputs * inputs * count / ms
            bare = bare_gflops(outputs, inputs, count, load.rows, dtype)
            beside = f"{rate:6.0f} GFLOP/s; bare {bare:.0f}"
        elif part == ATTENTION:
            beside = _bandwidth(found, shape, load, dtype)
        print(f"  {part:20} {ms:8.3f} ms  {ms / found.whole_ms:6.1%}  {beside}")
    host = sum(found.parts_ms[part] for part in HOST)
    print(f"  {'host work in all':20} {host:8.3f} ms  {host / found.whole_ms:6.1%}")


def _bandwidth(found: Profile, shape: Shape, load: Load, dtype: str) -> str:
    per_key = 2 * shape.kv_heads * shape.head_dim * ITEM_BYTES[dtype] * shape.layers
    each, shared = load.rows * found.keys, (load.rows - 1) * load.shared
    seconds = found.parts_ms[ATTENTION] * 1e-3
    once = f", {(each - shared) * per_key / seconds / 1e9:.1f} of each key once" * bool(shared)
    rate = f"{each * per_key / seconds / 1e9:6.1f} GB/s of keys and values seen{once}"
    return f"{rate}; copy {copy_gbs():.1f}"


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    shape = TINY if options.quick else MID
    steps, passes = (4, 1) if options.quick else (options.steps, options.passes)
    load = Load(rows=options.rows, keys=options.keys, shared=options.shared)
    print(
        f"{load.rows} rows of {load.keys} keys{f', {load.shared} shared' * bool(load.shared)}, "
        f"{shape.layers} layers of {shape.hidden}, {options.threads} threads; {machine()}"
    )
    for dtype in options.dtype:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
            ahead = WARM_STEPS + steps * passes
            engine, generated = make_engine(
                Path(name), shape, load, dtype, ahead, options.batch_invariant
            )
        found = profile(engine, generated, shape, load, steps, passes)
        each = " ".join(f"{one.whole_ms:.2f}" for one in found)
        middle = sorted(found, key=lambda one: one.whole_ms)[passes // 2]
        print(f"\n{dtype}: {middle.whole_ms:.2f} ms per step ({passes} passes of {steps}: {each})")
        report(middle, shape, load, dtype)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, one pass of 4 steps")
    add("--rows", type=int, default=16, help="rows of the batch (default 16)")
    add("--keys", type=int, default=256, help="keys of each row (default 256)")
    add("--shared", type=int, default=0, help="keys that all rows share (default 0)")
    add("--dtype", nargs="+", choices=list(ITEM_BYTES), default=["float32"])
    add("--batch-invariant", choices=("auto", "on", "off"), default="auto")
    add("--threads", type=int, default=2, help="threads of the engine (default 2)")
    add("--steps", type=int, default=16, help="steps per pass (default 16)")
    add("--passes", type=int, default=5, help="passes (default 5)")
    options = parser.parse_args()
    if not 0 <= options.shared < options.keys:
        parser.error(f"--shared {options.shared} must be below --keys {options.keys}")
    return options


if __name__ == "__main__":
    main()
