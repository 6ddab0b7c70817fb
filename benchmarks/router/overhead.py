"""What a router adds to each request in latency and CPU time: Baton's, and rivals in the same run.

Closed loop: each of `clients` has one request at a time, with a prompt of its own of 500 tokens and
64 streamed tokens. Servers answer at once (0 ms) or with a token every 10 ms. Clients that start
together stay in step, because each request takes as many steps of the server: 32 prompts arrive at
one moment, again and again. "spread" is the same load with starts a 32nd of a request apart. Added
latency is relative to the same server without a router: for Baton the node's link, for rivals the
mock backend. CPU time is user and system time of the processes per request: for Baton the router
and the node's server process, which detokenizes; for rivals the router. The passes of all sides are
interleaved; each figure is the median of its passes.

    python -m benchmarks.router.overhead [--passes 3] [--rivals NAME ...] [--quick] [--profile FILE]

vllm-router, sglang-router and envoy forward text. Dynamo's frontend tokenizes, as Baton does, and
has its own simulated worker, so nothing is subtracted from its latency. "ids" is Baton's router
with token ids in and out, and no text. Goals (exit 1): at most 1.5 ms added at p50 for one client,
10 ms at p99 for 32; CPU at most 1.5x Dynamo's, and with ids at most 3x vllm-router's. --profile
writes the router's cProfile to FILE.0ms and FILE.10ms, and slows it down. Rivals take part if `make
peers-routers` has installed them.

    python -m benchmarks.router.overhead --routers 1 2 [--passes 3] [--quick]

shows instead the gain from more routers: requests per second at 64 clients and 0 ms, and CPU time
per request, for each number of routers. There is no goal, because routers, nodes and clients share
the cores; the table says how many there are.

    python -m benchmarks.router.overhead --dialects [--tokens 64] [--passes 3] [--quick]
        [--profile FILE]

compares instead streams of equal text in several dialects, and a kept stream (x-baton-resume), with
chat: CPU time per request of the router alone, for 32 clients. Goals (exit 1): at most 1.15x chat's
for Responses and Messages, 1.05x for kept chat. --tokens is the length of an answer; the difference
of two lengths is what their tokens cost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from baton_cli.models.demo_model import fetch_demo
from baton_text.artifacts import read_artifacts
from baton_text.tokenizer import Tokenizer
from benchmarks.support.figures import percentile
from benchmarks.support.rivals import ROOT
from benchmarks.support.router import load_generator
from benchmarks.support.router.dialect_costs import dialect_costs, dialect_goals, dialect_table
from benchmarks.support.router.load_generator import (
    Question,
    Send,
    Timing,
    closed_loop,
    direct_link,
    http_clients,
)
from benchmarks.support.router.router_scaling import CLIENTS, scaling, scaling_table
from benchmarks.support.router.routers import RIVALS, Side, baton, rivals, taking_part

PROMPT_TOKENS, ANSWER_TOKENS = 500, 64
DELAYS_MS = (0.0, 10.0)
NODE, MOCK, OURS, IDS = "node, directly", "mock, directly", "baton", "baton, ids"
GOAL_P50_MS, GOAL_P99_MS = 1.5, 10.0
GOAL_DYNAMO, GOAL_VLLM = 1.5, 3.0


class Load(NamedTuple):
    delay_ms: float
    clients: int
    spread: bool = False

    @property
    def apart_s(self) -> float:
        """Between the beginnings of two clients."""
        return self.delay_ms * ANSWER_TOKENS / 1e3 / self.clients if self.spread else 0.0

    def __str__(self) -> str:
        spread = " spread" if self.spread else ""
        return f"{self.delay_ms:g} ms, {self.clients} client{'s' * (self.clients > 1)}{spread}"


BUSY = Load(0.0, 32)
# Requests of one pass of each: some seconds.
REQUESTS = {
    Load(0.0, 1): 60,
    BUSY: 320,
    Load(10.0, 1): 6,
    Load(10.0, 32): 128,
    Load(10.0, 32, spread=True): 128,
}

Place = tuple[Load, str]  # and the side


@dataclass
class Cell:
    """Of one side's passes: ms to the first token, ms of a request, CPU ms per request."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, timings: Sequence[Timing], cpu_s: float) -> None:
        firsts = [timing.first_ms for timing in timings]
        self.p50.append(statistics.median(firsts))
        self.p99.append(percentile(firsts, 0.99))
        self.last.append(statistics.median(timing.last_ms for timing in timings))
        self.cpu.append(1e3 * cpu_s / len(timings))


class Figures(NamedTuple):
    """Medians of a cell's passes."""

    p50: float
    p99: float
    last: float
    cpu: float


class Run(NamedTuple):
    """One row of the table; a `link` is asked instead of HTTP."""

    name: str
    side: Side
    link: Send | None = None


class Questions:
    """Prompts of which none begins like another."""

    def __init__(self, folder: Path, tokens: int = ANSWER_TOKENS) -> None:
        self._tokens = tokens
        self._tokenizer = Tokenizer.from_artifacts(read_artifacts(folder))
        self._rng = random.Random(0)
        words = (ROOT / "README.md").read_text(encoding="utf-8").split()
        self._words = sorted({word for word in words if word.isalpha()})

    def some(self, count: int) -> list[Question]:
        return [self._one() for _ in range(count)]

    def _one(self) -> Question:
        """Cut to its tokens, and text again."""
        text = " ".join(self._rng.choices(self._words, k=PROMPT_TOKENS))
        ids = tuple(self._tokenizer.encode(text)[:PROMPT_TOKENS])
        return Question(self._tokenizer.decode(ids), ids, self._tokens)


async def measure(options: argparse.Namespace, folder: Path) -> Mapping[Place, Figures]:
    cells: defaultdict[Place, Cell] = defaultdict(Cell)
    questions = Questions(folder)
    for delay_ms in DELAYS_MS:
        with ExitStack() as processes:
            profile = options.profile and f"{options.profile}.{delay_ms:g}ms"
            ours = baton(processes, delay_ms, folder, profile)
            others = rivals(processes, options.rivals, delay_ms, folder)
            async with direct_link(ours.node) as link:
                runs = [Run(NODE, ours, link), Run(OURS, ours), Run(IDS, ours)]
                runs += [Run(side.name, side) for side in others]
                await passes(runs, cells, questions, delay_ms, options)
    return {place: medians(cell) for place, cell in cells.items()}


async def passes(
    runs: Sequence[Run],
    cells: Mapping[Place, Cell],
    questions: Questions,
    delay_ms: float,
    options: argparse.Namespace,
) -> None:
    """All sides in turn, as often as there are passes; one that does not count goes ahead."""
    for number in range(options.passes + 1):
        for load, count in REQUESTS.items():
            if load.delay_ms != delay_ms:
                continue
            for run in runs:
                asked = questions.some(max(load.clients, count // options.less))
                before = run.side.cpu_s()
                timings = await one_pass(run, load, asked)
                if number:
                    cells[load, run.name].add(timings, run.side.cpu_s() - before)


async def one_pass(run: Run, load: Load, questions: Sequence[Question]) -> list[Timing]:
    if run.link is not None:
        return await closed_loop([run.link] * load.clients, questions, load.apart_s)
    port, model = run.side.port, run.side.model
    form = load_generator.IDS if run.name == IDS else load_generator.TEXT
    async with http_clients(port, model, load.clients, form) as senders:
        return await closed_loop(senders, questions, load.apart_s)


def medians(cell: Cell) -> Figures:
    return Figures(*(statistics.median(each) for each in (cell.p50, cell.p99, cell.last, cell.cpu)))


def added(found: Mapping[Place, Figures], place: Place) -> Figures | None:
    """Over the same server asked directly; None for one that has a server of its own."""
    load, name = place
    if name in ("dynamo", NODE, MOCK):
        return None
    base = found[load, NODE if name in (OURS, IDS) else MOCK]
    one = found[place]
    return Figures(*(mine - theirs for mine, theirs in zip(one, base, strict=True)))


def table(found: Mapping[Place, Figures]) -> list[str]:
    lines = [
        f"{'load':26}{'side':16}{'TTFT p50':>9}{'p99':>8}{'added p50':>11}"
        f"{'p99':>8}{'request':>9}{'CPU ms':>8}"
    ]
    for (load, name), one in found.items():
        more = added(found, (load, name))
        extra = f"{more.p50:11.2f}{more.p99:8.2f}" if more else " " * 19
        lines.append(
            f"{load!s:26}{name:16}{one.p50:9.2f}{one.p99:8.2f}{extra}{one.last:9.1f}{one.cpu:8.2f}"
        )
    return lines


def goals(found: Mapping[Place, Figures]) -> list[tuple[str, bool]]:
    """Each with whether it is met; those about rivals only where they ran."""
    verdicts = []
    for load in REQUESTS:
        more = added(found, (load, OURS))
        assert more is not None
        if load.clients == 1:
            verdicts.append((f"{load}: p50 {more.p50:+.2f} ms", more.p50 < GOAL_P50_MS))
        else:
            verdicts.append((f"{load}: p99 {more.p99:+.2f} ms", more.p99 < GOAL_P99_MS))
    for mine, other, most in ((OURS, "dynamo", GOAL_DYNAMO), (IDS, "vllm-router", GOAL_VLLM)):
        if (BUSY, other) in found:
            ratio = found[BUSY, mine].cpu / found[BUSY, other].cpu
            verdicts.append((f"CPU of {mine} {ratio:.2f}x {other}'s (goal {most}x)", ratio <= most))
    return verdicts


def count_of_routers(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= CLIENTS:
        raise argparse.ArgumentTypeError(f"{text} routers are not possible; give 1 to {CLIENTS}")
    return int(text)


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """`less` is what divides the requests of a pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, help="(default: all that are there)")
    parser.add_argument("--routers", nargs="+", type=count_of_routers, metavar="N")
    parser.add_argument("--dialects", action="store_true", help="compare dialects, without rivals")
    tokens_help = "length of an answer, with --dialects"
    parser.add_argument("--tokens", type=int, default=ANSWER_TOKENS, help=tokens_help)
    parser.add_argument("--quick", action="store_true", help="one short pass without rivals")
    parser.add_argument("--profile", default="", metavar="FILE")
    options = parser.parse_args(argv)
    options.less = 1
    if options.quick:
        options.passes, options.less = 1, 2
    if options.quick or options.dialects:
        options.rivals = []
    options.rivals = taking_part(options.rivals)
    return options


def main() -> int:
    options = options_of()
    folder = fetch_demo(None, lambda line: print(line, file=sys.stderr))
    if options.routers:
        counts, some = dict.fromkeys(options.routers), Questions(folder).some
        loads = scaling([*counts], some, folder, passes=options.passes, less=options.less)
        print("\n".join(scaling_table(loads, os.cpu_count() or 1)))
        return 0
    if options.dialects:
        some = Questions(folder, options.tokens).some
        costs = dialect_costs(
            some, folder, passes=options.passes, less=options.less, profile=options.profile
        )
        lines, verdicts = dialect_table(costs), dialect_goals(costs)
    else:
        found = asyncio.run(measure(options, folder))
        lines, verdicts = table(found), goals(found)
    print(f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
    print("\n".join(lines))
    for text, met in verdicts:
        print(f"{'met   ' if met else 'MISSED'} {text}")
    return 0 if all(met for _, met in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
