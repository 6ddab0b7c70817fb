"""What a router tells the index of its clients' requests, and that nothing waits for the index."""

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
from baton_router.settings import Bounds, RouterSettings
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.processes import free_port
from tests.support.nodes.processes import running as running_nodes
from tests.support.stores.kvstore import frozen, held_down, plain_client

pytestmark = pytest.mark.integration

WAIT_S = 180.0
TTL_S = 600.0  # of the reports of a process, longer than any test
BODY = {"prompt": "x" * 64, "max_tokens": 8}
CODE = """
import asyncio, sys
from baton_router import RouterSettings, serve
from baton_router.settings import Bounds
bounds = Bounds(report_ttl_s=float(sys.argv[2]))
settings = RouterSettings(port=0, index_url=sys.argv[1], wake_wait_s=600.0, bounds=bounds)
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
    async with Registry(redis.index_url, "default") as opened:
        yield opened


def settings_of(redis: EmbeddedStore, *nodes: FakeNode, every_s: float = 0.05) -> RouterSettings:
    """Of a router that may be asked before its nodes are there."""
    return RouterSettings(
        port=0,
        index_url=redis.index_url,
        nodes=tuple(node.address for node in nodes),
        wake_wait_s=WAIT_S,
        bounds=Bounds(report_every_s=every_s),
    )


async def reported(
    registry: Registry, wanted: Callable[[list[RouterReport]], object]
) -> list[RouterReport]:
    """What the routers say, once it is as wanted."""
    async with asyncio.timeout(WAIT_S):
        while not wanted(reports := await registry.routers()):
            await asyncio.sleep(0.02)
    return reports


async def ask(url: str, body: Any) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.json()


async def test_each_router_says_what_it_was_asked(
    redis: EmbeddedStore, registry: Registry, decode: FakeNode
) -> None:
    settings = settings_of(redis, decode)
    async with Router(settings) as first, Router(settings) as second:
        await ask(f"http://127.0.0.1:{first.port}", BODY)
        reports = await reported(
            registry, lambda all: sorted(one.requests_total for one in all) == [0, 1]
        )
        asked = max(reports, key=lambda one: one.requests_total)
        assert (asked.prompt_tokens_total, asked.output_tokens_total) == (64, 8)
        assert sum(asked.ttft_counts) == 1
        assert {one.router for one in reports} == {first.report().router, second.report().router}


async def test_a_router_that_ends_is_no_longer_listed(
    redis: EmbeddedStore, registry: Registry
) -> None:
    async with Router(settings_of(redis)):
        await reported(registry, lambda all: len(all) == 1)
    assert await registry.routers() == []


async def test_the_first_request_that_is_held_is_told_at_once(
    redis: EmbeddedStore, registry: Registry
) -> None:
    """The first report is told, and then only what cannot wait for the next one."""
    async with Router(settings_of(redis, every_s=3600.0)) as router:
        await reported(registry, lambda all: len(all) == 1)
        answer = asyncio.create_task(ask(f"http://127.0.0.1:{router.port}", BODY))
        [report] = await reported(registry, lambda all: any(one.held for one in all))
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
    assert (report.held, report.live, report.idle_s, report.requests_total) == (1, 0, 0.0, 0)


async def test_requests_are_answered_while_the_index_is_frozen(
    redis: EmbeddedStore, registry: Registry, decode: FakeNode
) -> None:
    async with Router(settings_of(redis, decode)) as router:
        await reported(registry, lambda all: len(all) == 1)
        url = f"http://127.0.0.1:{router.port}"
        with frozen(redis.pid("index")):
            for _ in range(3):
                assert (await ask(url, BODY))["usage"]["completion_tokens"] == 8
            assert router.report().requests_total == 3
        await reported(registry, lambda all: any(one.requests_total == 3 for one in all))


async def test_a_router_starts_serves_and_ends_without_an_index_to_report_to(
    redis: EmbeddedStore, decode: FakeNode
) -> None:
    with held_down(redis, "index"):
        async with Router(settings_of(redis, decode)) as router:
            await ask(f"http://127.0.0.1:{router.port}", BODY)
            assert router.report().requests_total == 1


@asynccontextmanager
async def process(index_url: str) -> AsyncIterator[tuple[Any, str]]:
    """A router that holds requests, in a process of its own, and its URL."""
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
        await reported(registry, lambda all: len(all) == 2)
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == 0
        [left] = await registry.routers()
        second.kill()
        await second.wait()
    with plain_client(redis.index_url) as client:
        assert 0 < client.pttl(router_key("default", left.router)) <= 1000 * TTL_S


async def test_a_node_that_comes_later_answers_what_was_held_exactly(
    redis: EmbeddedStore, registry: Registry
) -> None:
    """Real processes, found by the index alone; asked again, the same pool says the same."""
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
        answer = asyncio.create_task(ask(url, body))
        await reported(registry, lambda all: any(one.held for one in all))
        async with running_nodes(node):
            held, again = await answer, await ask(url, body)
        [report] = await reported(registry, lambda all: any(one.requests_total == 2 for one in all))
    assert len(held["choices"][0]["token_ids"]) == 24
    assert held["choices"] == again["choices"]
    assert (report.held, report.live) == (0, 0)
