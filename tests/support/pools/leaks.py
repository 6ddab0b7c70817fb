"""Checks that an idle cluster has released its resources.

In: a healthy cluster without requests. Out: nothing, or an AssertionError that names what is still
held: blocks, requests, bookings, file descriptors, threads, tasks, memory, keys without a TTL.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import psutil

from tests.support.clients.http import Json, exchange, text_of
from tests.support.pools.processes import Cluster, Node
from tests.support.pools.role_process import RoleProcess

SETTLE_S = 120.0
_METRIC = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def metrics_of(url: str) -> dict[str, float]:
    """The values of a /metrics page by name, summed over labels."""
    values: dict[str, float] = {}
    for name, value in _METRIC.findall(text_of(url, "/metrics")):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def held_by_pool(state: Json) -> list[str]:
    """The resources that /pool reports as held; an idle pool has none."""
    held_resources = []
    for node in state["nodes"]:
        load, booked = node["load"], node["booked"]
        figures = {name: load[name] for name in ("running", "waiting", "parked", "queued_tokens")}
        figures |= {f"booked {name}": value for name, value in booked.items()}
        figures["blocks held"] = load["total_blocks"] - load["free_blocks"]
        held_resources += [
            f"{node['id']}: {name} {value}" for name, value in figures.items() if value
        ]
    if running := state["totals"]["requests_running"]:
        held_resources.append(f"router: {running} requests")
    return held_resources


def held_by_node(node: Node) -> list[str]:
    """The resources that the node itself reports as held, independent of routers."""
    figures = metrics_of(node.url)
    held = {
        "blocks": figures["baton_kv_blocks"] - figures["baton_kv_blocks_free"],
        "requests": exchange(node.url, "/health").body["requests"],
    }
    for name in ("running", "waiting", "parked"):
        held[name] = figures[f"baton_requests_{name}"]
    return [f"{node.name} itself: {name} {value:g}" for name, value in held.items() if value]


def settle(cluster: Cluster, timeout_s: float = SETTLE_S) -> None:
    """Wait until requests hold no resources; raise AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while still_held := held(cluster):
        assert time.monotonic() < deadline, f"after {timeout_s:g} s: {still_held}"
        time.sleep(0.05)


def held(cluster: Cluster) -> list[str]:
    resources = held_by_pool(cluster.pool())
    for node in cluster.nodes.values():
        resources += held_by_node(node)
    return resources


@dataclass(frozen=True)
class Level:
    fds: int
    threads: int
    tasks: int
    rss: int

    def above(self, base: Level, spare: Level) -> list[str]:
        """The figures that exceed `base` by more than `spare`."""
        return [
            f"{name} {getattr(base, name)} then {getattr(self, name)}"
            for name in ("fds", "threads", "tasks", "rss")
            if getattr(self, name) > getattr(base, name) + getattr(spare, name)
        ]


# Pools of connections and threads grow with the peak load, leaks with every request.
SPARE = Level(fds=16, threads=16, tasks=8, rss=128 << 20)
# torch keeps buffers for each shape of batch that it has met.
SPARE_WITH_TORCH = Level(fds=16, threads=16, tasks=8, rss=768 << 20)


class Levels:
    """Compares each process with its level when it was first seen idle."""

    def __init__(self, spare: Level = SPARE) -> None:
        self._base: dict[int, Level] = {}
        self._spare = spare

    def check(self, cluster: Cluster) -> None:
        """Record new processes; wait until the others are back at their level."""
        deadline = time.monotonic() + SETTLE_S
        for role_process in cluster.processes():
            while excess := self._above(role_process):
                assert time.monotonic() < deadline, f"{role_process.name} has {excess}"
                time.sleep(0.1)
        if cluster.store is not None:
            assert cluster.store.immortal_keys() == []

    def _above(self, role_process: RoleProcess) -> list[str]:
        tasks = int(metrics_of(role_process.url).get("baton_asyncio_tasks", 0))
        server = psutil.Process(role_process.pid)
        excess = []
        for process in (server, *server.children()):
            level = _level(process, tasks)
            base = self._base.setdefault(process.pid, level)
            excess += [f"pid {process.pid}: {what}" for what in level.above(base, self._spare)]
        return excess


def _level(process: psutil.Process, tasks: int) -> Level:
    return Level(process.num_fds(), process.num_threads(), tasks, process.memory_info().rss)
