"""How many requests and open streams one router serves: Baton's, and rivals' in the same run.

    python -m benchmarks.router.capacity [--parts clients streams routers] [--rivals NAME ...]
        [--routers 1 2 4] [--streams 1000] [--passes 3] [--quick] [--write]

clients    requests/s of 1, 8, 32 and 128 clients in a closed loop with 500 tokens in, 64 streamed;
           servers answer at once. For Baton text, and ids in and out.
streams    what the router's resident memory grows by, per stream that has begun; and 32 clients, a
           token every 10 ms, without and beside 1,000 open streams that get a token a second: time
           to the first token, and requests/s.
routers    requests/s of 64 clients by the number of routers (`benchmarks.router.overhead --routers`
           has more of it).

Servers, routers and clients share the cores. vllm-router, sglang-router and envoy stand before a
server in Python, which limits their requests; Dynamo's simulated worker is its own, and cannot be
slow. --write writes the plot of clients and routers, docs/capacity.svg. Goal (exit 1): as many
requests as Dynamo at 32 clients. Rivals take part if `make peers-routers` has installed them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from baton_cli.models.demo_model import fetch_demo
from benchmarks.router.overhead import IDS, MOCK, OURS, Questions, count_of_routers
from benchmarks.support.figures import Verdict, at_least, exit_code, spread
from benchmarks.support.rivals import ROOT
from benchmarks.support.router import load_generator
from benchmarks.support.router.capacity_plot import plot
from benchmarks.support.router.load_generator import Question, closed_loop, http_clients
from benchmarks.support.router.open_streams import (
    FAST_CLIENTS,
    StreamFigures,
    allow_many_files,
    measure_baton,
    measure_rivals,
)
from benchmarks.support.router.router_scaling import CLIENTS, scaling
from benchmarks.support.router.routers import RIVALS, Side, baton, rivals, taking_part

PLOT = ROOT / "docs/capacity.svg"
REQUESTS = {1: 100, 8: 320, 32: 640, 128: 640}  # of one pass, by clients
BUSY = 32
FAST_REQUESTS = 256
PARTS = ("clients", "streams", "routers")

Rates = Mapping[str, Mapping[int, Sequence[float]]]  # requests/s of each pass, by side and clients


async def rates_by_clients(options: argparse.Namespace, folder: Path) -> Rates:
    """All sides in turn, as often as there are passes; one that does not count goes ahead."""
    some = Questions(folder).some
    found: defaultdict[str, dict[int, list[float]]] = defaultdict(dict)
    with ExitStack() as stack:
        ours = baton(stack, 0.0, folder)
        sides = [(OURS, ours), (IDS, ours)]
        sides += [(side.name, side) for side in rivals(stack, options.rivals, 0.0, folder)]
        for number in range(options.passes + 1):
            for clients, count in REQUESTS.items():
                for name, side in sides:
                    if name == MOCK:
                        continue
                    asked = max(clients, count // options.less)
                    rate = await requests_per_s(name, side, clients, some(asked))
                    if number:
                        found[name].setdefault(clients, []).append(rate)
    return found


async def requests_per_s(name: str, side: Side, clients: int, asked: list[Question]) -> float:
    form = load_generator.IDS if name == IDS else load_generator.TEXT
    async with http_clients(side.port, side.model, clients, form) as senders:
        began = time.perf_counter()
        await closed_loop(senders, asked)
        return len(asked) / (time.perf_counter() - began)


async def slow_streams(options: argparse.Namespace, folder: Path) -> list[StreamFigures]:
    asked = Questions(folder).some(FAST_REQUESTS // options.less)
    ours = await measure_baton(folder, options.streams, asked)
    return [ours, *await measure_rivals(options.rivals, folder, options.streams, asked)]


def rates_table(rates: Rates) -> Iterator[str]:
    yield f"{'requests/s, clients:':24}" + "".join(f"{clients:>20}" for clients in REQUESTS)
    for name, by_clients in rates.items():
        yield f"{name:24}" + "".join(f"{spread(by_clients[each], 0):>20}" for each in REQUESTS)


def streams_table(found: Sequence[StreamFigures]) -> Iterator[str]:
    yield (
        f"{FAST_CLIENTS} clients beside open streams: TTFT p50/p99 ms and requests/s, alone and "
        "beside them"
    )
    for one in found:
        node = "" if one.node_kb is None else f", node's server {one.node_kb:.1f} kB"
        yield (
            f"{one.side:16}{one.alone.p50:7.1f}/{one.alone.p99:.1f}{one.alone.rate:7.1f}/s"
            f"{one.beside.p50:9.1f}/{one.beside.p99:.1f}{one.beside.rate:7.1f}/s"
            f"   {one.streams} streams, {one.stream_kb:.1f} kB each{node}"
        )


def verdicts(rates: Rates) -> list[Verdict]:
    if "dynamo" not in rates:
        return []
    verdict = at_least(rates[OURS][BUSY], rates["dynamo"][BUSY], 1.0)
    text = f"requests/s at {BUSY} clients against Dynamo {verdict.text}"
    return [Verdict(verdict.met, text)]


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """`less` is what divides the requests of a pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, help="(default: all that are there)")
    parser.add_argument(
        "--routers", nargs="+", type=count_of_routers, metavar="N", default=[1, 2, 4]
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help="write docs/capacity.svg")
    parser.add_argument("--quick", action="store_true", help="one short pass without rivals")
    options = parser.parse_args(argv)
    if options.write and not {"clients", "routers"} <= {*options.parts}:
        parser.error("--write needs the parts clients and routers, which the plot shows")
    options.less = 1
    if options.quick:
        options.passes, options.less, options.routers = 1, 8, [1, 2]
        options.rivals = [] if options.rivals is None else options.rivals
    options.rivals = taking_part(options.rivals)
    return options


def rates_by_routers(options: argparse.Namespace, folder: Path) -> dict[int, list[float]]:
    some, counts = Questions(folder).some, [*dict.fromkeys(options.routers)]
    loads = scaling(counts, some, folder, passes=options.passes, less=options.less)
    return {number: [load.rate for load in each] for number, each in loads.items()}


def main() -> int:
    options = options_of()
    allow_many_files()
    folder = fetch_demo(None, lambda line: print(line, file=sys.stderr))
    rates: Rates = {}
    by_routers: dict[int, list[float]] = {}
    if "clients" in options.parts:
        rates = asyncio.run(rates_by_clients(options, folder))
        print("\n".join(rates_table(rates)), flush=True)
    if "routers" in options.parts:
        by_routers = rates_by_routers(options, folder)
        for number, each in by_routers.items():
            print(f"{number} routers: {spread(each, 0)} requests/s at {CLIENTS} clients")
    if options.write:
        PLOT.write_text(plot(rates, by_routers, os.cpu_count() or 1))
    if "streams" in options.parts:
        found = asyncio.run(slow_streams(options, folder))
        print("\n".join(streams_table(found)), flush=True)
    print(f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
    goals = verdicts(rates)
    for goal in goals:
        print(goal.text)
    return exit_code(goals, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
