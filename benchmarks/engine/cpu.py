"""Baton's engine on a CPU, beside vLLM's CPU build and transformers' generate in the same run, and
beside itself with transformers' code for the model (--model-impl transformers).

Workloads: `standard`, 16 prompts of 64-256 random ids with 64 new tokens each; `decode-heavy`, 32
prompts of 32 ids with 256 new tokens; `shared-prefix`, 16 prompts of 64 ids after 1,000 common
ones. Sampling is greedy and ignores the end of text. The model has 116M random parameters in
Qwen3's shape. The passes of all sides are interleaved, so a slow minute of the machine affects all;
medians are compared. Prints each side's tokens per second, Baton's ratio to it, the speed of its
matrix products and of the machine's, and how many answers equal Baton's. vLLM takes part if `make
peers` has installed it. `--quick` runs one short pass on a tiny model, without vLLM.

`--one-stream` measures one request alone on the demo model instead, with 1 and 2 threads, beside
vLLM and llama.cpp, without which it ends with an error.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.support.engine.cpu_engines import (
    Baton,
    Ids,
    Side,
    Transformers,
    Vllm,
    vllm_takes_part,
)
from benchmarks.support.engine.cpu_workloads import (
    SEED,
    SHAPES,
    WORKLOADS,
    Shape,
    Workload,
    save_model,
)
from benchmarks.support.engine.one_stream import one_stream

RIVALS = ("vllm", "bridge", "batch", "one-by-one")
DTYPES = ("float32", "bfloat16")
# Of transformers; the first is its default. `batched_mm` would copy 5 MB of weights per token and
# expert.
EXPERTS = ("grouped_mm", "eager")


def main() -> None:
    options = parse_options()
    if options.one_stream:
        one_stream(range(1, options.threads + 1), options.passes)
        return
    torch.set_num_threads(options.threads)
    shape, passes = SHAPES[options.model][options.quick], 1 if options.quick else options.passes
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name, ExitStack() as stack:
        folder = Path(name) / "model"
        parameters = save_model(folder, shape)
        speeds = ", ".join(f"{matrix_gflops(dtype):.0f} GFLOP/s in {dtype}" for dtype in DTYPES)
        print(
            f"{parameters / 1e6:.0f}M parameters per token, {options.threads} threads; "
            f"matrix product 256x2304x4608: {speeds}"
        )
        sides = make_sides(folder, options)
        for side in sides:
            stack.callback(side.close)
        for workload in options.workload:
            work = WORKLOADS[workload](random.Random(options.seed))
            if options.quick:
                work = work.shortened(64, 8)
            compare(workload, work, shape, sides, passes)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny model, one pass of 8 tokens, no vLLM")
    add("--one-stream", action="store_true", help="one request alone on the demo model")
    add("--model", choices=list(SHAPES), default="dense", help="(default dense)")
    add("--threads", type=int, default=2, help="threads of each side (default 2)")
    add("--passes", type=int, default=3, help="passes per side (default 3)")
    add("--seed", type=int, default=SEED, help=f"seed of prompts (default {SEED})")
    add(
        "--workload",
        nargs="+",
        choices=list(WORKLOADS),
        default=["standard"],
        help="(default standard)",
    )
    add(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=list(DTYPES),
        help="dtypes of Baton, one side each; the rivals run in the first (default both)",
    )
    add(
        "--batch-invariant",
        nargs="+",
        choices=("auto", "on", "off"),
        default=["auto"],
        help="one side each (default auto)",
    )
    add("--rivals", nargs="*", choices=RIVALS, help="(default all; with --quick not vllm)")
    add("--max-batched-tokens", type=int, help="token budget of Baton's engine (default: its own)")
    return parser.parse_args()


def make_sides(folder: Path, options: argparse.Namespace) -> list[Side]:
    """Ours first: the others are compared with it."""
    budget = options.max_batched_tokens
    sides: list[Side] = [
        Baton(folder, dtype, options.threads, budget, batch_invariant)
        for dtype in options.dtype
        for batch_invariant in options.batch_invariant
    ]
    rivals = options.rivals
    if rivals is None:
        rivals = [rival for rival in RIVALS if not (options.quick and rival == "vllm")]
    dtype = options.dtype[0]
    if "vllm" in rivals and vllm_takes_part(asked=options.rivals is not None):
        sides.append(Vllm(folder, dtype, options.threads))
    if "bridge" in rivals:
        sides.append(Baton(folder, dtype, options.threads, budget, model_impl="transformers"))
    ways: Sequence[str | None] = EXPERTS if SHAPES[options.model][0].experts else (None,)
    for name, batch in (("batch", True), ("one-by-one", False)):
        if name in rivals:
            sides += [Transformers(folder, dtype, batch=batch, experts=way) for way in ways]
    return sides


def matrix_gflops(dtype: str) -> float:
    """Speed of a product of the size a prefill step has."""
    a = torch.randn(256, 2304).to(getattr(torch, dtype))
    b = torch.randn(4608, 2304).to(a.dtype)
    times = [seconds(lambda: torch.nn.functional.linear(a, b)) for _ in range(20)]
    return 2 * 256 * 2304 * 4608 / statistics.median(times) / 1e9


def seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def compare(name: str, work: Workload, shape: Shape, sides: Sequence[Side], passes: int) -> None:
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    ids: dict[str, Ids] = {}
    for side in sides:
        side.run(work.shortened(64, 2))
    for _ in range(passes):
        for side in sides:
            passed, ids[side.name] = side.run(work)
            times[side.name].append(passed)
    print(
        f"\n{name}: {len(work.prompts)} prompts, {sum(map(len, work.prompts))} tokens"
        f"{f' ({work.shared} of each shared)' if work.shared else ''}, {work.new_tokens} new each; "
        f"{passes} interleaved passes"
    )
    print(
        f"{'':26} {'median s':>9} {'tok/s':>7} {'GFLOP/s':>8} {'ours':>6}   passes in s; same ids"
    )
    ours = sides[0].name
    for side_name, seconds in times.items():
        middle = statistics.median(seconds)
        same = sum(a == b for a, b in zip(ids[side_name], ids[ours], strict=True))
        print(
            f"{side_name:26} {middle:9.2f} {work.output_tokens / middle:7.1f} "
            f"{shape.operations(work) / middle / 1e9:8.0f} "
            f"{middle / statistics.median(times[ours]):5.2f}x   "
            f"{' '.join(f'{value:.2f}' for value in seconds)}; {same}/{len(work.prompts)}"
        )


if __name__ == "__main__":
    main()
