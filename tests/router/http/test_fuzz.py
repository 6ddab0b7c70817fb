"""Bytes that are not HTTP, sent to a router process: it continues to serve, keeps no memory or
tasks, and logs no failure."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.router.http.raw_bytes import connection
from tests.support.clients.http import complete, ids_of
from tests.support.pools.leaks import metrics_of, settle
from tests.support.pools.processes import SIM, Cluster

pytestmark = pytest.mark.integration

SEED = 20_261_123
AT_ONCE = 16
READ_S = 0.05  # a router that waits for the rest of a request sends nothing
SETTLE_S = 120.0
SPARE_TASKS = 4
SPARE_BYTES = 48 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(0, 1, flags=SIM, store=False) as cluster:
        yield cluster


async def send(port: int, rng: random.Random) -> None:
    """Make one connection. Some clients read, some close at once, some reset."""
    pieces, reads, resets = connection(rng), rng.random() < 0.7, rng.random() < 0.3
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 10.0)
        if reads:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1 << 16), READ_S)
    if resets:
        writer.transport.abort()
    writer.close()
    with contextlib.suppress(ConnectionError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), 10.0)


async def send_many(port: int, seed: int, count: int) -> None:
    rngs = [random.Random(seed * 1_000_003 + number) for number in range(count)]

    async def work() -> None:
        while rngs:
            await send(port, rngs.pop())

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def check(cluster: Cluster, count: int) -> None:
    url, port = cluster.url, cluster.router.port
    expected = ids_of(complete(url, [7, 8, 9] * 20, max_tokens=20, seed=1, temperature=0.9))
    asyncio.run(send_many(port, SEED - 1, 100))  # fills pools and caches
    settle(cluster)
    process = psutil.Process(cluster.router.pid)
    tasks, rss = int(metrics_of(url)["baton_asyncio_tasks"]), process.memory_info().rss
    asyncio.run(send_many(port, SEED, count))
    settle(cluster)
    again = ids_of(complete(url, [7, 8, 9] * 20, max_tokens=20, seed=1, temperature=0.9))
    assert again == expected
    until = time.monotonic() + SETTLE_S
    while metrics_of(url)["baton_asyncio_tasks"] > tasks + SPARE_TASKS:
        assert time.monotonic() < until, f"{tasks} tasks, then {metrics_of(url)}"
        time.sleep(0.1)
    assert process.memory_info().rss < rss + SPARE_BYTES
    log = cluster.router.log_text()
    assert "listens on" in log
    for failure in ("Traceback", "never retrieved", "Unhandled", " failed"):
        at = log.find(failure)
        assert at < 0, log[max(0, at - 500) : at + 2000]


def test_300_random_connections_do_not_harm_the_router(cluster: Cluster) -> None:
    check(cluster, 300)


@pytest.mark.long
def test_20000_random_connections_do_not_harm_the_router(cluster: Cluster) -> None:
    check(cluster, 20_000)
