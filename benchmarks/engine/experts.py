"""The experts of a layer on a CPU, beside transformers' own in the same run.

    python -m benchmarks.engine.experts [--quick] [--threads 2] [--dtype float32 bfloat16]

The mixture has 32 experts of 576 inner numbers, of which a token takes 4, and a hidden size of 768:
with 16 layers and the attention of `benchmarks.engine.cpu`'s model, 116M parameters compute each
token. Steps have 1, 8 and 32 tokens, as in decoding, and 512, as in a prompt; all sides get the
same routes, new ones in each pass. Layers take turns, so that no side finds its weights in a cache.
Rivals are transformers' implementations of experts: a loop (eager), `grouped_mm` (its default) and
`batched_mm`, which copies the weights of each token and is left out where the copies would take
over 1 GiB.

Two goals: 1.25 times as fast as the fastest of them; and steps of 1 to 32 tokens read their
experts once each, at 0.6 times the speed of a sum over a large array. A sum reads as fast as
memory gives: a side that is half as fast as a sum can be beaten by 2 and no more.
With `--threads 1` all times are the thread's CPU time, which other programs disturb least.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from baton_engine.kv.kv_pool import TORCH_DTYPES
from baton_engine.layers.experts import ExpertWeights, Routes
from baton_engine.layers.ops import TORCH_OPS
from benchmarks.engine.cpu_step import clock
from benchmarks.support.figures import Verdict, at_least, exit_code, machine, spread

RIVALS = ("eager", "grouped_mm", "batched_mm")
DTYPES = ("float32", "bfloat16")
OURS = "baton"
LEAST_RATIO, LEAST_BANDWIDTH = 1.25, 0.6
DECODE_TOKENS = 32  # steps with more are not bounded by memory
MODEL_LAYERS = 16  # for tokens per second
COPIES_BYTES = 1 << 30
READ_BYTES = 256 << 20

# Computes a layer, given by its number.
Side = Callable[[int, torch.Tensor, Routes], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """`layers` is how many take turns."""

    hidden: int
    size: int
    experts: int
    chosen: int
    layers: int

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.size


SMALL = Mixture(hidden=768, size=576, experts=32, chosen=4, layers=4)
TINY = Mixture(hidden=128, size=96, experts=8, chosen=2, layers=2)


@dataclass(frozen=True)
class Timed:
    """Seconds of each side per pass, and the bytes of the weights that a pass needs."""

    seconds: dict[str, list[float]]
    weight_bytes: list[int]
    read_gbs: list[float]  # of a large array, measured in each pass


def make_sides(mixture: Mixture, dtype: torch.dtype) -> dict[str, Side]:
    """Ours first. All have the same weights, ours in a copy."""
    config = Qwen3MoeConfig(
        hidden_size=mixture.hidden,
        moe_intermediate_size=mixture.size,
        num_experts=mixture.experts,
        num_experts_per_tok=mixture.chosen,
    )
    noise = torch.Generator().manual_seed(0)
    module: Any = Qwen3MoeExperts
    modules = [module(config).to(dtype) for _ in range(mixture.layers)]
    for each in modules:
        for parameter in each.parameters():
            parameter.requires_grad_(False).normal_(0.0, 0.03, generator=noise)
    packed = [
        TORCH_OPS.pack_experts(ExpertWeights(each.gate_up_proj.clone(), each.down_proj.clone()))
        for each in modules
    ]

    def rival(name: str) -> Side:
        def compute(layer: int, x_TD: torch.Tensor, routes: Routes) -> torch.Tensor:
            config._experts_implementation = name
            out_TD: torch.Tensor = modules[layer](x_TD, routes.ids_TC, routes.weights_TC.to(dtype))
            return out_TD

        return compute

    return {
        OURS: lambda layer, x_TD, routes: TORCH_OPS.experts(x_TD, routes, packed[layer]),
        **{name: rival(name) for name in RIVALS},
    }


def compare(
    sides: dict[str, Side],
    mixture: Mixture,
    dtype: torch.dtype,
    tokens: int,
    passes: int,
    array: torch.Tensor,
) -> Timed:
    """The first pass is not counted. `array` is read beside."""
    draw, now = torch.Generator().manual_seed(tokens), clock()
    copies = tokens * mixture.chosen * mixture.expert_weights * dtype.itemsize
    taking_part = {
        name: side for name, side in sides.items() if name != "batched_mm" or copies <= COPIES_BYTES
    }
    seconds: dict[str, list[float]] = {name: [] for name in taking_part}
    weight_bytes, read = [], []
    for number in range(passes + 1):
        x_TD = torch.randn(tokens, mixture.hidden, generator=draw).to(dtype)
        scores_TE = torch.rand(tokens, mixture.experts, generator=draw)
        ids_TC = scores_TE.topk(mixture.chosen).indices.sort(-1).values
        weights_TC = scores_TE.gather(1, ids_TC)
        routes = Routes(ids_TC, weights_TC / weights_TC.sum(-1, keepdim=True))
        outputs = []
        for name, side in taking_part.items():
            began = now()
            outputs.append(side(number % mixture.layers, x_TD, routes))
            seconds[name].append(now() - began)
        for output in outputs[1:]:
            torch.testing.assert_close(output, outputs[0], rtol=0.02, atol=0.02)
        weight_bytes.append(
            len(set(ids_TC.flatten().tolist())) * mixture.expert_weights * dtype.itemsize
        )
        read.append(read_gbs(array))
    return Timed({name: each[1:] for name, each in seconds.items()}, weight_bytes[1:], read[1:])


def read_gbs(array: torch.Tensor) -> float:
    """10^9 bytes per second of a sum."""
    now = clock()
    began = now()
    array.sum()
    return array.nbytes / (now() - began) / 1e9


def report(timed: Timed, mixture: Mixture, tokens: int) -> list[Verdict]:
    """Print a line per side, and return the verdicts."""
    ours, verdicts = timed.seconds[OURS], []
    operations = 2 * tokens * mixture.chosen * mixture.expert_weights
    best = min(
        (name for name in timed.seconds if name != OURS),
        key=lambda name: statistics.median(timed.seconds[name]),
    )
    for name, seconds in timed.seconds.items():
        middle = statistics.median(seconds)
        rates = [size / each / 1e9 for size, each in zip(timed.weight_bytes, seconds, strict=True)]
        beside = ""
        if name == OURS and tokens <= DECODE_TOKENS:
            verdicts.append(at_least(rates, timed.read_gbs, LEAST_BANDWIDTH))
            beside = f"of {statistics.median(timed.read_gbs):.1f} GB/s: {verdicts[-1].text}"
        elif name == best:
            verdicts.append(at_least(seconds, ours, LEAST_RATIO))
            beside = verdicts[-1].text
        elif name != OURS:
            beside = f"{middle / statistics.median(ours):5.2f}x"
        print(
            f"  {name:11} {spread([each * 1e3 for each in seconds]):>24} ms "
            f"{tokens / middle / MODEL_LAYERS:9.1f} tok/s {operations / middle / 1e9:6.0f} GFLOP/s "
            f"{statistics.median(rates):6.1f} GB/s  {beside}",
            flush=True,
        )
    return verdicts


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    mixture, passes = (TINY, 2) if options.quick else (SMALL, options.passes)
    print(
        f"{mixture.experts} experts of {mixture.size} x {mixture.hidden}, {mixture.chosen} per "
        f"token; {options.threads} threads of {cpu()}; {machine()}\n"
        f"a layer's experts: ms, median [range] of {passes} passes; tokens per second of "
        f"{MODEL_LAYERS} layers' experts; transformers' times by ours"
    )
    array = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    verdicts: list[Verdict] = []
    with torch.inference_mode():
        for dtype in options.dtype:
            sides = make_sides(mixture, TORCH_DTYPES[dtype])
            for tokens in options.tokens:
                print(f"{dtype}, {tokens} token{'s' * (tokens > 1)}")
                timed = compare(sides, mixture, TORCH_DTYPES[dtype], tokens, passes, array)
                verdicts += report(timed, mixture, tokens)
    return exit_code(verdicts, quick=options.quick)


def cpu() -> str:
    """The name that this CPU gives itself."""
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "a CPU without a name"


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny mixture, two passes")
    add("--threads", type=int, default=2, help="threads of each side (default 2)")
    add("--passes", type=int, default=9, help="passes (default 9)")
    add("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--tokens", nargs="+", type=int, default=[1, 8, 32, 512], help="of a step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
