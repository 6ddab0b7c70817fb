"""Memory of connections and streams in the router, and its release.

The bounds are those of docs/operations/scale.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psutil
import pytest

from tests.support.clients.crowd import Crowd, allow_files
from tests.support.pools.leaks import metrics_of, settle
from tests.support.pools.processes import Cluster

pytestmark = pytest.mark.integration

KIB = 1 << 10
PER_CONNECTION, PER_STREAM = 32 * KIB, 160 * KIB
SPARE_BYTES = 16 << 20  # memory of a router's first requests
SPARE_TASKS, SPARE_FILES = 8, 16
FILES = 12_000
SETTLE_S = 120.0
WARM, MORE = 20_000, 80_000
FAST_NODE = ("--engine=sim", "--kv-blocks=4000", "--max-model-len=2048")
# The node runs all streams at the same time, and none ends before the test closes it.
SLOW_NODE = (
    *("--engine=sim", "--max-model-len=2048", "--sim-decode-ms=200"),
    *("--max-num-seqs=1024", "--max-batched-tokens=2048", "--kv-blocks=70000"),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if not allow_files(FILES):
        pytest.skip(f"the hard limit on open files is below {FILES} (ulimit -Hn)")
    with Cluster(0, 1, flags=SLOW_NODE, store=False, watch_answers=False) as cluster:
        asyncio.run(warm(cluster.router.port))
        settle(cluster)
        yield cluster


@pytest.fixture(scope="module")
def fast_cluster() -> Iterator[Cluster]:
    """A pool whose node answers at once."""
    with Cluster(0, 1, flags=FAST_NODE, store=False, watch_answers=False) as cluster:
        yield cluster


async def warm(port: int) -> None:
    async with Crowd(port) as crowd:
        await crowd.stream(8, 5)


def router(cluster: Cluster) -> psutil.Process:
    return psutil.Process(cluster.router.pid)


def grown(cluster: Cluster, gather: Callable[[Crowd], Coroutine[Any, Any, None]]) -> int:
    """Bytes by which the router grows while the crowd is connected. Afterwards its tasks and open
    files must be back at their numbers."""
    process, url = router(cluster), cluster.url
    before, files = process.memory_info().rss, process.num_fds()
    tasks = metrics_of(url)["baton_asyncio_tasks"]

    async def run() -> int:
        async with Crowd(cluster.router.port) as crowd:
            await gather(crowd)
            rss: int = process.memory_info().rss
            return rss

    during = asyncio.run(run())
    settle(cluster)
    until = time.monotonic() + SETTLE_S
    while (
        metrics_of(url)["baton_asyncio_tasks"] > tasks + SPARE_TASKS
        or process.num_fds() > files + SPARE_FILES
    ):
        assert time.monotonic() < until, "tasks or connections are left"
        time.sleep(0.1)
    return int(during - before)


@pytest.mark.parametrize("count", [200, pytest.param(1_000, marks=pytest.mark.long)])
def test_streams_stay_within_the_documented_memory(cluster: Cluster, count: int) -> None:
    [node] = cluster.nodes.values()

    async def gather(crowd: Crowd) -> None:
        await crowd.stream(count, 1_000)
        until = time.monotonic() + SETTLE_S
        while (await asyncio.to_thread(metrics_of, node.url))["baton_requests_running"] < count:
            assert time.monotonic() < until, "the node does not run all streams"
            await asyncio.sleep(0.1)
        figures = await asyncio.to_thread(metrics_of, cluster.url)
        assert figures["baton_router_requests_running"] == count

    more = grown(cluster, gather)
    print(f"{count} streams: {more / count / KIB:.1f} KiB each")
    assert more < SPARE_BYTES + count * PER_STREAM


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_idle_connections_stay_within_the_documented_memory(cluster: Cluster, count: int) -> None:
    more = grown(cluster, lambda crowd: crowd.idle(count))
    print(f"{count} idle connections: {more / count / KIB:.1f} KiB each")
    assert more < SPARE_BYTES + count * PER_CONNECTION


@pytest.mark.long
def test_100000_requests_do_not_grow_the_router(fast_cluster: Cluster) -> None:
    grown(fast_cluster, lambda crowd: crowd.ask(WARM, 32))
    base = router(fast_cluster).memory_info().rss
    grown(fast_cluster, lambda crowd: crowd.ask(MORE, 32))
    now = router(fast_cluster).memory_info().rss
    print(f"{base >> 20} MiB after {WARM} requests, {now >> 20} after {WARM + MORE}")
    assert now < 1.05 * base
