"""Requests per second of a router by its number of workers, at the highest load that it serves.

Enough clients to saturate it run in a closed loop in this process. Nodes answer at once; all passes
have two nodes for each worker of the largest number that is tried, because an engine takes as much
CPU time per request as a worker. Each pass has new processes: an idle router would receive all
events of the nodes.

In: numbers of workers, questions. Out: `Load`s by number of workers, and their table.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.support.figures import ratio, rotated, spread
from benchmarks.support.role_processes import answer_of, cpu_s, model_of, process, tree
from benchmarks.support.router.load_generator import Question, closed_loop, http_clients
from benchmarks.support.router.routers import sim_node
from benchmarks.support.servers import HOST, free_port

CLIENTS, REQUESTS = 64, 640
NODES_PER_WORKER = 2


class Load(NamedTuple):
    """Of one pass: requests per second, and CPU ms per request of the router's workers together, of
    the nodes (servers and engines) and of the clients."""

    rate: float
    router_ms: float
    nodes_ms: float
    clients_ms: float


class Pool(NamedTuple):
    port: int
    model: str
    router: tuple[psutil.Process, ...]
    nodes: tuple[psutil.Process, ...]


def scaling(
    counts: Sequence[int],
    questions: Callable[[int], list[Question]],
    model: Path,
    *,
    passes: int,
    less: int,
) -> dict[int, list[Load]]:
    """Passes take turns; `less` divides the requests of one."""
    nodes = NODES_PER_WORKER * max(counts)
    found: dict[int, list[Load]] = {workers: [] for workers in counts}
    for number in range(passes):
        for workers in rotated(counts, number):
            with ExitStack() as stack:
                pool = started(stack, workers, nodes, model)
                asked = questions(2 * CLIENTS), questions(REQUESTS // less)
                found[workers].append(asyncio.run(one_pass(pool, *asked)))
    return found


def started(stack: ExitStack, workers: int, nodes: int, model: Path) -> Pool:
    """A pool in which all are ready."""
    behind = [sim_node(stack, f"decode-{number}", 0.0, model) for number in range(nodes)]
    port = free_port()
    words = (sys.executable, "-m", "baton_cli", "router", "--log-level", "warning")
    where = ("--port", str(port), "--nodes", ",".join(url for url, _ in behind))
    root = stack.enter_context(process((*words, *where, "--workers", str(workers))))
    answer_of(f"http://{HOST}:{port}/pool", lambda body: complete(json.loads(body), workers, nodes))
    servers = [server for _, server in behind]
    below = tuple(one for server in servers for one in tree(server))
    return Pool(port, model_of(port), tree(root), below)


def complete(page: Mapping[str, list[object]], workers: int, nodes: int) -> bool:
    """Whether /pool lists these numbers. A router without workers lists none."""
    return len(page.get("workers", [None])) == workers and len(page["nodes"]) == nodes


async def one_pass(pool: Pool, warm_up: Sequence[Question], asked: Sequence[Question]) -> Load:
    async with http_clients(pool.port, pool.model, CLIENTS) as senders:
        await closed_loop(senders, warm_up)
        router, nodes = cpu_s(pool.router), cpu_s(pool.nodes)
        own, began = time.process_time(), time.perf_counter()
        await closed_loop(senders, asked)
        took = time.perf_counter() - began
        spent = (cpu_s(pool.router) - router, cpu_s(pool.nodes) - nodes, time.process_time() - own)
    return Load(len(asked) / took, *(1e3 * each / len(asked) for each in spent))


def scaling_table(found: Mapping[int, Sequence[Load]], cores: int) -> list[str]:
    """Medians and ranges, and ratios to the first number of workers, pass by pass. `cores`: those
    of the machine."""
    lines = [
        f"{'workers':>7}{'requests/s':>20}{'x':>7}{'router CPU ms':>20}{'x':>7}{'nodes':>7}"
        f"{'clients':>9}{'at most/s':>11}"
    ]
    first = next(iter(found.values()))
    for workers, loads in found.items():
        rates, costs = [one.rate for one in loads], [one.router_ms for one in loads]
        nodes = statistics.median(one.nodes_ms for one in loads)
        clients = statistics.median(one.clients_ms for one in loads)
        lines.append(
            f"{workers:7}{spread(rates, 0):>20}{ratio(rates, [one.rate for one in first]):7.2f}"
            f"{spread(costs):>20}{ratio(costs, [one.router_ms for one in first]):7.2f}"
            f"{nodes:7.2f}{clients:9.2f}{ceiling(loads, cores):11.0f}"
        )
    return [
        *lines,
        f"{cores} cores for the router, {NODES_PER_WORKER * max(found)} nodes and {CLIENTS} clients"
        " together; CPU ms are per request;",
        (
            "at most/s: the rate that these cores allow at that CPU time, with the clients "
            "on one of them"
        ),
    ]


def ceiling(loads: Sequence[Load], cores: int) -> float:
    """Requests per second, whatever the number of workers."""
    together = statistics.median(one.router_ms + one.nodes_ms + one.clients_ms for one in loads)
    clients = statistics.median(one.clients_ms for one in loads)
    return 1e3 / max(together / cores, clients)
