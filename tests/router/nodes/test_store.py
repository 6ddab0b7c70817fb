"""The router with a real index: discovery, placement by markers, and service without the index."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import aiohttp
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.markers import Index
from baton_kvstore.index.registry import Registry
from baton_protocol.hashing import chunk_hashes, extend_hashes, root_hash
from baton_protocol.store import Marker
from baton_router.server.router import Router
from baton_router.settings import RouterSettings, Tunables
from tests.support.nodes.fake_node import LAYOUT, FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

PROMPT = "x" * 200
BODY = {"prompt": PROMPT, "max_tokens": 1}


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore() as running:
        yield running


async def placement(router: Router, session: aiohttp.ClientSession) -> str:
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    async with session.post(url, json=BODY) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-baton-placement"]


async def test_nodes_are_discovered_and_stored_chunks_are_not_computed_again(
    store: EmbeddedStore, decode: FakeNode, prefill: FakeNode
) -> None:
    tunables = Tunables(lookup_timeout_ms=5000.0)
    settings = RouterSettings(port=0, index_url=store.index_url, tunables=tunables)
    async with (
        Registry(store.index_url, "default") as registry,
        Index(store.index_url, "default") as index,
        Router(settings) as router,
        aiohttp.ClientSession() as session,
    ):
        for node in (decode, prefill):
            await registry.register(node.report, ttl_s=60.0)
        await until(lambda: len(list(router.view.ready())) == 2)
        assert "prefill=prefill-0 decode=decode-0" in await placement(router, session)
        root = root_hash(decode.report.fingerprint)
        blocks = extend_hashes(root, list(PROMPT.encode()), LAYOUT.block_size)
        for chunk in chunk_hashes(blocks, LAYOUT.chunk_blocks):
            marker = Marker(0, "run", LAYOUT.chunk_bytes, 1, 0)
            await index.mark_all(decode.report.fingerprint, [(chunk, marker, 60_000)])
        assert "prefill=- decode=decode-0 reason=short" in await placement(router, session)
        assert router.api.pool.store_reachable() is True


async def test_a_dead_index_stops_only_hand_offs(
    store: EmbeddedStore, decode: FakeNode, prefill: FakeNode
) -> None:
    settings = RouterSettings(port=0, index_url=store.index_url)
    async with Router(settings) as router, aiohttp.ClientSession() as session:
        async with Registry(store.index_url, "default") as registry:
            for node in (decode, prefill):
                await registry.register(node.report, ttl_s=60.0)
        await until(lambda: len(list(router.view.ready())) == 2)
        os.kill(store.pid("index"), signal.SIGKILL)
        async with asyncio.timeout(120):
            while "reason=store_down" not in await placement(router, session):
                await asyncio.sleep(0.02)
        await until(lambda: router.api.pool.store_reachable() is False)


async def test_a_router_starts_and_serves_while_the_index_is_down(decode: FakeNode) -> None:
    settings = RouterSettings(
        port=0, index_url="unix:///nonexistent/redis.sock", nodes=(decode.address,)
    )
    async with Router(settings) as router, aiohttp.ClientSession() as session:
        await until(lambda: list(router.view.ready()))
        assert "decode=decode-0" in await placement(router, session)
