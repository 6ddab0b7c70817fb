"""One request alone on the demo model: milliseconds per token of its answer, beside vLLM's CPU
build, llama.cpp, and the time that reading the weights once takes.

In: numbers of threads, passes. Out: a table. In bfloat16 beside vLLM; in the codes of the GGUF file
from which the demo model is made (Q4_1) beside llama.cpp with the same file. Sides take turns. A
token's time is that of an answer of NEW tokens less that of the first, so prompts do not count.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from baton_cli.models.demo_model import fetch_demo, find_gguf
from baton_engine.memory.huge_pages import ask_for_huge_pages
from benchmarks.support.engine.cpu_engines import Baton, Side, Vllm, vllm_takes_part
from benchmarks.support.engine.cpu_workloads import Workload
from benchmarks.support.engine.llama_cpp import LlamaCpp, llama_cpp_takes_part
from benchmarks.support.figures import machine, spread

PROMPT, NEW = 64, 96
VOCAB = 49_152
# Every weight is in one product: 30 layers, and the embedding, which is the head.
WEIGHTS = 134_515_008


@dataclass(frozen=True)
class Stream:
    """A side and how it computes a token: milliseconds of each, of an answer to a prompt."""

    name: str
    token_ms: Callable[[list[int]], float]


def one_stream(threads: Sequence[int], passes: int) -> None:
    vllm_takes_part(asked=True)
    llama_cpp_takes_part(asked=True)
    folder, file = fetch_demo(None, lambda line: print(line, file=sys.stderr)), find_gguf()
    print(f"one request alone, {PROMPT} prompt tokens, {NEW} new; {machine()}")
    for count in threads:
        torch.set_num_threads(count)
        with ExitStack() as stack:
            streams = [*_streams(folder, file, count, stack)]
            found = measured(streams, passes)
        print(f"\n{count} threads: ms per token, median [range] of {passes} passes")
        for name, values in found.items():
            print(f"  {name:40} {spread(values):>24}")
        print(f"  {'reading all weights once, bfloat16':40} {reading_ms(2 * WEIGHTS):8.2f}")
        print(f"  {f'reading {file.name}':40} {reading_ms(file.stat().st_size):8.2f}", flush=True)


def _streams(folder: Path, file: Path, threads: int, stack: ExitStack) -> Iterator[Stream]:
    def of(side: Side) -> Stream:
        stack.callback(side.close)
        return Stream(side.name, lambda prompt: _token_ms(side, prompt))

    yield of(Baton(folder, "bfloat16", threads, None))
    yield of(Vllm(folder, "bfloat16", threads))
    of_file = of(Baton(file, "bfloat16", threads, None))
    yield Stream(f"{of_file.name}, GGUF", of_file.token_ms)
    llama = LlamaCpp(file, threads, PROMPT + NEW)
    stack.callback(llama.close)
    yield Stream(f"{llama.name.split(' (')[0]}, GGUF", lambda ids: 1e3 / llama.run(ids, NEW).decode)


def _token_ms(side: Side, prompt: list[int]) -> float:
    first, _ = side.run(Workload([prompt], 1))
    whole, _ = side.run(Workload([prompt], NEW))
    return 1e3 * (whole - first) / (NEW - 1)


def measured(streams: Sequence[Stream], passes: int) -> dict[str, list[float]]:
    """Of each pass but the first, which warms up."""
    found: dict[str, list[float]] = {stream.name: [] for stream in streams}
    draw = random.Random(0)
    for number in range(passes + 1):
        prompt = [draw.randrange(1, VOCAB) for _ in range(PROMPT)]
        for stream in streams:
            value = stream.token_ms(prompt)
            if number:
                found[stream.name].append(value)
    return found


def reading_ms(size: int) -> float:
    """The least time of reading `size` bytes of memory once, on torch's threads."""
    memory = torch.empty(size // 8, dtype=torch.float64)
    ask_for_huge_pages(memory.data_ptr(), memory.nbytes)
    memory.fill_(1.0)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        memory.sum()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)
