"""Quantized weights on a CPU: decoding and prompts of a whole engine, beside its own bfloat16.

    python -m benchmarks.engine.quantized [--quick] [--threads 2] [--shape 116M 1B] [--kinds ...]

Weights are random, drawn in the form of a checkpoint of compressed-tensors: "int8" has a scale per
output, "int4" one per 128 inputs, "int4 g32" one per 32, and "w8a8" rounds the inputs of layers to
int8, too. The embedding, which is also the head, stays bfloat16, and so does all that is computed.
The shapes are the 116M-parameter model of `benchmarks.engine.cpu`, and one with the layers of
Llama-3.2-1B. All engines are in memory at once and take turns, so that a slow minute of the machine
hits all; a ratio is the median of the passes' ratios.

llama.cpp takes part if `make peers` has installed it, with random weights of the same shape: Q4_0
beside "int4 g32", and Q8_0 beside "int8 g32". Its embedding and head have 8 bits.

Goals: int8 and int4 decode at least 1.3 times as fast as bfloat16 with one request, and compute
prompts at least 0.9 times as fast.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from baton_engine.build import build_torch
from baton_engine.config.engine_config import TorchSettings
from baton_engine.core.engine_core import EngineCore
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.engine.cpu_step import clock
from benchmarks.engine.experts import cpu
from benchmarks.support.engine.cpu_workloads import MID, TINY, VOCAB, Shape, write_config
from benchmarks.support.engine.llama_cpp import LlamaCpp, llama_cpp_takes_part
from benchmarks.support.engine.random_gguf import Kind, write_random_gguf
from benchmarks.support.figures import Verdict, at_least, exit_code, machine, ratio, rotated, spread

SHAPES = {
    "116M": MID,
    "1B": Shape(hidden=2048, layers=16, mlp=8192, heads=32, kv_heads=8, head_dim=64),
}
PLAIN = "bf16"
KINDS = ("int8", "int8 g32", "int4", "int4 g32", "w8a8")
WITH_GOALS = ("int8", "int4")
# The kind of a GGUF file with the same codes.
IN_LLAMA_CPP: Mapping[str, Kind] = {"int4 g32": "Q4_0", "int8 g32": "Q8_0"}
DECODE_GOAL, PROMPT_GOAL = 1.3, 0.9
BATCHES = (1, 8)
KEYS, PROMPT = 64, 512
DECODE_ONE, PROMPTS = "decode, 1", f"prompt of {PROMPT}"
BLOCK = 16


def quantization(kind: str) -> Mapping[str, Any] | None:
    """The quantization_config of a kind."""
    if kind == PLAIN:
        return None
    bits, inputs = (4 if "int4" in kind else 8), None
    weights: dict[str, Any] = {"type": "int", "num_bits": bits, "symmetric": True}
    weights |= {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": 128}
    if kind.endswith("g32"):
        weights |= {"strategy": "group", "group_size": 32}
    if kind == "w8a8":
        inputs = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if bits == 4 else "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


class Side:
    """An engine with weights of one kind, and the tokens per second of each pass by workload."""

    def __init__(self, kind: str, shape: Shape, threads: int) -> None:
        self.kind, self.rates = kind, dict[str, list[float]]()
        self._draw = random.Random(0)
        self._submitted = 0
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
            write_config(Path(name), shape, quantization(kind))
            self._engine: EngineCore = build_torch(
                TorchSettings(
                    model=Path(name),
                    load_format="dummy",
                    dtype="bfloat16",
                    threads=threads,
                    block_size=BLOCK,
                    kv_blocks=(max(BATCHES) + 1) * (PROMPT + KEYS) // BLOCK,
                    max_batched_tokens=PROMPT,
                    max_num_seqs=max(BATCHES),
                    max_model_len=PROMPT + KEYS,
                )
            )

    def measured(self, steps: int) -> dict[str, float]:
        """Tokens per second by workload."""
        rates = {f"decode, {rows}": self.decode(rows, steps) for rows in BATCHES}
        return rates | {PROMPTS: self.prompt()}

    def decode(self, rows: int, steps: int) -> float:
        """Tokens per second of `rows` requests that all generate."""
        for _ in range(rows):
            self._submit(KEYS, rows + steps + 2)
        started: set[str] = set()
        while len(started) < rows:
            started |= {str(token.request) for token in self._engine.step().tokens}
        now = clock()
        began, tokens = now(), 0
        for _ in range(steps):
            tokens += len(self._engine.step().tokens)
        passed = now() - began
        self._finish()
        return tokens / passed

    def prompt(self) -> float:
        """Tokens per second of a prompt."""
        self._submit(PROMPT, 1)
        now = clock()
        began = now()
        self._finish()
        return PROMPT / (now() - began)

    def _submit(self, prompt: int, new_tokens: int) -> None:
        self._submitted += 1
        self._engine.submit(
            Request(
                id=RequestId(str(self._submitted)),
                attempt=0,
                prompt_ids=tuple(self._draw.randrange(VOCAB) for _ in range(prompt)),
                params=SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True),
                outputs=((),),
            )
        )

    def _finish(self) -> None:
        while self._engine.has_work():
            self._engine.step()


class Rival:
    """llama.cpp with weights of one kind."""

    def __init__(self, beside: str, shape: Shape, threads: int) -> None:
        self.kind, self.rates = IN_LLAMA_CPP[beside], dict[str, list[float]]()
        self.beside = beside
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            file = Path(folder) / "random.gguf"
            write_random_gguf(file, shape, self.kind)
            self._server = LlamaCpp(file, threads, PROMPT + KEYS)
        self.name = self._server.name
        self._draw = random.Random(0)

    def measured(self, steps: int) -> dict[str, float]:
        decode, prompt = (
            self._server.run([self._draw.randrange(1, VOCAB) for _ in range(size)], tokens)
            for size, tokens in ((KEYS, steps + 1), (PROMPT, 1))
        )
        return {DECODE_ONE: decode.decode, PROMPTS: prompt.prompt}

    def close(self) -> None:
        self._server.close()


def measure(sides: Sequence[Side | Rival], passes: int, steps: int) -> None:
    """The first pass is not counted."""
    for number in range(passes + 1):
        for side in rotated(sides, number):
            found = side.measured(steps)
            for name, rate in found.items() if number else ():
                side.rates.setdefault(name, []).append(rate)


def report(sides: Sequence[Side], rivals: Sequence[Rival]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    plain = sides[0].rates
    for workload, theirs in plain.items():
        for side in sides:
            ours, beside = side.rates[workload], ""
            goal = PROMPT_GOAL if workload.startswith("prompt") else DECODE_GOAL
            if side.kind in WITH_GOALS and workload != f"decode, {max(BATCHES)}":
                verdicts.append(at_least(ours, theirs, goal))
                beside = verdicts[-1].text
            elif side.kind != PLAIN:
                beside = f"{ratio(ours, theirs):5.2f}x"
            beside += "".join(_beside(side, workload, rivals))
            print(f"  {workload:15} {side.kind:9} {spread(ours, 1):>24} tok/s  {beside}")
        for rival in rivals:
            if workload in rival.rates:
                print(
                    f"  {workload:15} {rival.kind:9} {spread(rival.rates[workload], 1):>24} tok/s"
                )
    return verdicts


def _beside(side: Side, workload: str, rivals: Sequence[Rival]) -> Iterator[str]:
    for rival in rivals:
        if rival.beside == side.kind and workload in rival.rates:
            found = ratio(side.rates[workload], rival.rates[workload])
            yield f", {found:.2f}x of llama.cpp's {rival.kind}"


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    passes, steps = (1, 4) if options.quick else (options.passes, options.steps)
    verdicts: list[Verdict] = []
    print(f"{options.threads} threads of {cpu()}; {machine()}")
    compared = [kind for kind in options.kinds if kind in IN_LLAMA_CPP and not options.quick]
    if compared and not llama_cpp_takes_part(asked=False):
        compared = []
    for name in options.shape:
        shape = TINY if options.quick else SHAPES[name]
        with ExitStack() as stack:
            sides = [Side(kind, shape, options.threads) for kind in (PLAIN, *options.kinds)]
            rivals = []
            for kind in compared:
                rivals.append(Rival(kind, shape, options.threads))
                stack.callback(rivals[-1].close)
            measure([*sides, *rivals], passes, steps)
        print(f"{'tiny' if options.quick else name}: median [range] of {passes} passes", flush=True)
        for rival in rivals:
            print(f"  {rival.kind} is by {rival.name}")
        verdicts += report(sides, rivals)
    return exit_code(verdicts, quick=options.quick)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, one pass of 4 steps")
    add("--threads", type=int, default=2, help="threads of each side (default 2)")
    add("--passes", type=int, default=5, help="passes (default 5)")
    add("--steps", type=int, default=16, help="decode steps of a pass (default 16)")
    add("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="beside bf16")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
