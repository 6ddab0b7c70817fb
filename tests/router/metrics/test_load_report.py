"""The router's load reports in the index, and that no request waits for the index."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.registry import Registry
from baton_kvstore.keys import router_key
from baton_node.settings import NodeSettings
from baton_protocol.store import RouterReport
from baton_router.server.router import Router
from baton_router.settings import RouterSettings, Tunables
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.processes import free_port
from tests.support.nodes.processes import running as running_nodes
from tests.support.stores.kvstore import frozen, held_down, plain_client

pytestmark = pytest.mark.integration

WAIT_S = 180.0
TTL_S = 600.0  # TTL of a router process's reports; longer than any test
BODY = {"prompt": "x" * 64, "max_tokens": 8}
CODE = """
import asyncio, sys
from baton_router import RouterSettings, serve
from baton_router.settings import Tunables
tunables = Tunables(report_ttl_s=float(sys.argv[2]))
settings = RouterSettings(port=0, index_url=sys.argv[1], wake_wait_s=600.0, tunables=tunables)
asyncio.run(serve(settings, lambda host, port: print(port, flush=True)))
"""


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as running:
        yield running


@pytest.fixture
async def registry(redis: EmbeddedStore) -> AsyncIterator[Registry]:
    with plain_client(redis.index_url) as client:
        client.flushall()
    async with Registry(redis.index_url, "default") as registry:
        yield registry


def settings_of(redis: EmbeddedStore, *nodes: FakeNode, every_s: float = 0.05) -> RouterSettings:
    """Settings of a router that holds requests until its nodes are ready."""
    return RouterSettings(
        port=0,
        index_url=redis.index_url,
        nodes=tuple(node.address for node in nodes),
        wake_wait_s=WAIT_S,
        tunables=Tunables(report_every_s=every_s),
    )


async def until_reported(
    registry: Registry, holds: Callable[[list[RouterReport]], object]
) -> list[RouterReport]:
    """Wait until `holds` is true of the routers' reports, and return them."""
    async with asyncio.timeout(WAIT_S):
        while not holds(reports := await registry.routers()):
            await asyncio.sleep(0.02)
    return reports


async def complete(url: str, body: Any) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.json()


async def test_each_router_reports_its_own_requests(
    redis: EmbeddedStore, registry: Registry, decode: FakeNode
) -> None:
    settings = settings_of(redis, decode)
    async with Router(settings) as first, Router(settings) as second:
        await complete(f"http://127.0.0.1:{first.port}", BODY)
        reports = await until_reported(
            registry, lambda all: sorted(report.requests_total for report in all) == [0, 1]
        )
        busy = max(reports, key=lambda report: report.requests_total)
        assert (busy.prompt_tokens_total, busy.output_tokens_total) == (64, 8)
        assert sum(busy.ttft_counts) == 1
        names = {report.router for report in reports}
        assert names == {first.report().router, second.report().router}


async def test_a_router_that_shuts_down_removes_its_report(
    redis: EmbeddedStore, registry: Registry
) -> None:
    async with Router(settings_of(redis)):
        await until_reported(registry, lambda all: len(all) == 1)
    assert await registry.routers() == []


async def test_the_first_held_request_is_reported_at_once(
    redis: EmbeddedStore, registry: Registry
) -> None:
    """After the first report, only urgent changes are sent within the interval."""
    async with Router(settings_of(redis, every_s=3600.0)) as router:
        await until_reported(registry, lambda all: len(all) == 1)
        answer = asyncio.create_task(complete(f"http://127.0.0.1:{router.port}", BODY))
        [report] = await until_reported(registry, lambda all: any(each.held for each in all))
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
    assert (report.held, report.live, report.idle_s, report.requests_total) == (1, 0, 0.0, 0)


async def test_requests_are_answered_while_the_index_is_frozen(
    redis: EmbeddedStore, registry: Registry, decode: FakeNode
) -> None:
    async with Router(settings_of(redis, decode)) as router:
        await until_reported(registry, lambda all: len(all) == 1)
        url = f"http://127.0.0.1:{router.port}"
        with frozen(redis.pid("index")):
            for _ in range(3):
                assert (await complete(url, BODY))["usage"]["completion_tokens"] == 8
            assert router.report().requests_total == 3
        await until_reported(registry, lambda all: any(each.requests_total == 3 for each in all))


async def test_a_router_starts_serves_and_ends_while_the_index_is_down(
    redis: EmbeddedStore, decode: FakeNode
) -> None:
    with held_down(redis, "index"):
        async with Router(settings_of(redis, decode)) as router:
            await complete(f"http://127.0.0.1:{router.port}", BODY)
            assert router.report().requests_total == 1


@asynccontextmanager
async def process(index_url: str) -> AsyncIterator[tuple[Any, str]]:
    """A router process that holds requests, and its URL."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, index_url, str(TTL_S), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(WAIT_S):
            assert child.stdout is not None
            yield child, f"http://127.0.0.1:{int(await child.stdout.readline())}"
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_a_signal_withdraws_the_report_and_a_kill_leaves_it_to_expire(
    redis: EmbeddedStore, registry: Registry
) -> None:
    async with process(redis.index_url) as (first, _), process(redis.index_url) as (second, _):
        await until_reported(registry, lambda all: len(all) == 2)
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == 0
        [remaining] = await registry.routers()
        second.kill()
        await second.wait()
    with plain_client(redis.index_url) as client:
        assert 0 < client.pttl(router_key("default", remaining.router)) <= 1000 * TTL_S


async def test_a_node_that_starts_later_answers_the_held_request_exactly(
    redis: EmbeddedStore, registry: Registry
) -> None:
    """Real processes that find each other only through the index. The same request later gets the
    same answer."""
    node = NodeSettings(
        node="decode-0",
        role="decode",
        engine="sim",
        port=free_port(),
        index_url=redis.index_url,
        data_urls=redis.data_urls,
    )
    body = {"prompt": "Once", "max_tokens": 24, "seed": 7, "return_token_ids": True}
    async with process(redis.index_url) as (_, url):
        answer = asyncio.create_task(complete(url, body))
        await until_reported(registry, lambda all: any(each.held for each in all))
        async with running_nodes(node):
            held, later = await answer, await complete(url, body)
        [report] = await until_reported(
            registry, lambda all: any(each.requests_total == 2 for each in all)
        )
    assert len(held["choices"][0]["token_ids"]) == 24
    assert held["choices"] == later["choices"]
    assert (report.held, report.live) == (0, 0)
