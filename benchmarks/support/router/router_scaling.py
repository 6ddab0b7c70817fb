"""Requests per second by the number of routers, at the highest load that they serve.

Enough clients to saturate them run in a closed loop in this process, each at one router. Nodes
answer at once; all passes have two nodes for each router of the largest number that is tried,
because an engine takes as much CPU time per request as a router. Each pass has new processes: an
idle router would receive all events of the nodes.

In: numbers of routers, questions. Out: `Load`s by number of routers, and their table.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.support.figures import ratio, rotated, spread
from benchmarks.support.role_processes import answer_of, cpu_s, model_of, process, tree
from benchmarks.support.router.load_generator import Question, Send, closed_loop, http_clients
from benchmarks.support.router.routers import sim_node
from benchmarks.support.servers import HOST, free_port

CLIENTS, REQUESTS = 64, 640
NODES_PER_ROUTER = 2


class Load(NamedTuple):
    """Of one pass: requests per second, and CPU ms per request of the routers together, of the
    nodes (servers and engines) and of the clients."""

    rate: float
    router_ms: float
    nodes_ms: float
    clients_ms: float


class Pool(NamedTuple):
    ports: tuple[int, ...]
    model: str
    routers: tuple[psutil.Process, ...]
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
    nodes = NODES_PER_ROUTER * max(counts)
    loads: dict[int, list[Load]] = {routers: [] for routers in counts}
    for number in range(passes):
        for routers in rotated(counts, number):
            with ExitStack() as stack:
                pool = start_pool(stack, routers, nodes, model)
                asked = questions(2 * CLIENTS), questions(REQUESTS // less)
                loads[routers].append(asyncio.run(one_pass(pool, *asked)))
    return loads


def start_pool(stack: ExitStack, routers: int, nodes: int, model: Path) -> Pool:
    """A pool in which all are ready."""
    behind = [sim_node(stack, f"decode-{number}", 0.0, model) for number in range(nodes)]
    urls = ",".join(url for url, _ in behind)
    words = (sys.executable, "-m", "baton_cli", "router", "--log-level", "warning", "--nodes", urls)
    ports = tuple(free_port() for _ in range(routers))
    roots = [stack.enter_context(process((*words, "--port", str(port)))) for port in ports]
    for port in ports:
        answer_of(
            f"http://{HOST}:{port}/pool", lambda body: len(json.loads(body)["nodes"]) == nodes
        )
    servers = [server for _, server in behind]
    below = tuple(one for server in servers for one in tree(server))
    return Pool(ports, model_of(ports[0]), tuple(roots), below)


async def one_pass(pool: Pool, warm_up: Sequence[Question], asked: Sequence[Question]) -> Load:
    async with AsyncExitStack() as stack:
        senders: list[Send] = []
        for port in pool.ports:
            opened = http_clients(port, pool.model, CLIENTS // len(pool.ports))
            senders += await stack.enter_async_context(opened)
        await closed_loop(senders, warm_up)
        routers, nodes = cpu_s(pool.routers), cpu_s(pool.nodes)
        own, began = time.process_time(), time.perf_counter()
        await closed_loop(senders, asked)
        took = time.perf_counter() - began
        spent = (
            cpu_s(pool.routers) - routers,
            cpu_s(pool.nodes) - nodes,
            time.process_time() - own,
        )
    return Load(len(asked) / took, *(1e3 * seconds / len(asked) for seconds in spent))


def scaling_table(found: Mapping[int, Sequence[Load]], cores: int) -> list[str]:
    """Medians and ranges, and ratios to the first number of routers, pass by pass. `cores`: those
    of the machine."""
    lines = [
        f"{'routers':>7}{'requests/s':>20}{'x':>7}{'router CPU ms':>20}{'x':>7}{'nodes':>7}"
        f"{'clients':>9}{'at most/s':>11}"
    ]
    first = next(iter(found.values()))
    for routers, loads in found.items():
        rates, costs = [one.rate for one in loads], [one.router_ms for one in loads]
        nodes = statistics.median(one.nodes_ms for one in loads)
        clients = statistics.median(one.clients_ms for one in loads)
        lines.append(
            f"{routers:7}{spread(rates, 0):>20}{ratio(rates, [one.rate for one in first]):7.2f}"
            f"{spread(costs):>20}{ratio(costs, [one.router_ms for one in first]):7.2f}"
            f"{nodes:7.2f}{clients:9.2f}{ceiling(loads, cores):11.0f}"
        )
    return [
        *lines,
        f"{cores} cores for the routers, {NODES_PER_ROUTER * max(found)} nodes and {CLIENTS} "
        "clients together; CPU ms are per request;",
        (
            "at most/s: the rate that these cores allow at that CPU time, with the clients "
            "on one of them"
        ),
    ]


def ceiling(loads: Sequence[Load], cores: int) -> float:
    """Requests per second, whatever the number of routers."""
    together = statistics.median(one.router_ms + one.nodes_ms + one.clients_ms for one in loads)
    clients = statistics.median(one.clients_ms for one in loads)
    return 1e3 / max(together / cores, clients)
