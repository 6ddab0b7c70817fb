"""Fixtures: a router on a free port, connected to fake nodes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from baton_protocol.link import PrefillJob, RunJob
from baton_router.server.router import Router
from baton_router.settings import Bounds, RouterSettings
from tests.support.nodes.fake_node import FakeNode
from tests.support.pools.failing_pool import completing, half_sent
from tests.support.waiting import WAIT_S, until

# Short retries keep the tests fast. The drain timeout is long enough for a slow machine.
BOUNDS = Bounds(retry_model_s=0.05, reload_every_s=0.05, drain_answer_s=WAIT_S)


class Client:
    """An HTTP client of one router."""

    def __init__(self, router: Router, session: aiohttp.ClientSession) -> None:
        self.router = router
        self.session = session
        self.url = f"http://127.0.0.1:{router.port}"

    async def get(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        async with self.session.get(self.url + path, headers=headers) as response:
            response_headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), response_headers

    async def text(self, path: str, headers: Mapping[str, str] | None = None) -> str:
        async with self.session.get(self.url + path, headers=headers) as response:
            assert response.status == 200
            return await response.text()

    async def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        data: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            data = {"data": body}
            headers = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, headers=headers, **data) as response:
            response_headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), response_headers

    async def ready(self, nodes: int) -> None:
        view = self.router.view
        await until(lambda: len(list(view.ready())) == nodes)

    def dial(self, address: str) -> None:
        """Connect to a node, as discovery does for each address that it finds."""
        self.router._table.ensure_link(address)

    # --- the router's own reports -----------------------------------------------------------------

    async def pool(self) -> Any:
        status, pool, _ = await self.get("/pool", self._key())
        assert status == 200, pool
        return pool

    async def node(self, name: str) -> Any:
        """The node's entry in /pool."""
        [entry] = [node for node in (await self.pool())["nodes"] if node["id"] == name]
        return entry

    async def names(self) -> list[str]:
        """Names of the nodes in /pool."""
        return [node["id"] for node in (await self.pool())["nodes"]]

    async def chunks(self, name: str) -> int:
        """Number of chunks that the router believes are in the node's cache."""
        return int((await self.node(name))["cache"]["chunks"])

    async def booked(self) -> int:
        """Number of requests booked on all nodes."""
        return sum(node["booked"]["requests"] for node in (await self.pool())["nodes"])

    async def state(self, name: str) -> str:
        return str((await self.node(name))["state"])

    async def epoch(self, name: str) -> str:
        return str((await self.node(name))["epoch"])

    async def unreachable(self) -> list[str]:
        """Addresses of unreachable nodes."""
        return [entry["address"] for entry in (await self.pool())["unreachable"]]

    async def figure(self, name: str) -> float:
        """Sum of a metric's samples."""
        page = await self.text("/metrics", self._key())
        rows = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, rows))

    async def unfinished(self) -> int:
        """Number of unfinished requests, placed or not."""
        return int((await self.pool())["totals"]["requests_running"])

    async def answering(self) -> int:
        """Number of HTTP calls that are being answered."""
        return int(await self.figure("baton_router_requests_running"))

    async def queued(self) -> int:
        """Number of HTTP calls that wait because every node is full."""
        return int(await self.figure("baton_router_admission_queue"))

    async def held(self) -> int:
        """Number of requests that wait for a node."""
        return int(await self.figure("baton_router_requests_held"))

    def _key(self) -> dict[str, str]:
        key = self.router.settings.link_token
        return {"Authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def _running(
    *nodes: FakeNode, bounds: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Client]:
    options: dict[str, Any] = {"port": 0, "reconnect_max_s": 0.1}
    options["nodes"] = tuple(node.address for node in nodes)
    if "api_keys" in settings:
        options["link_token"] = "t0ken-of-the-tests"  # also grants access to /pool and /metrics
    options["bounds"] = msgspec.structs.replace(BOUNDS, **(bounds or {}))
    async with (
        Router(RouterSettings(**(options | settings))) as router,
        aiohttp.ClientSession() as session,
    ):
        client = Client(router, session)
        await client.ready(len(nodes))
        yield client


@pytest.fixture
def running() -> Any:
    """`async with running(node, ..., handoff="always", bounds={"ping_s": 0.2}) as client`: a router
    to which all given nodes are ready."""
    return _running


@pytest.fixture
def half_answered() -> Any:
    """`async with half_answered(decode, ...) as (client, answer)`: the router has half of one
    request's answer from `decode`, which then falls silent."""

    @asynccontextmanager
    async def opened(decode: FakeNode, *more: FakeNode, **settings: Any) -> AsyncIterator[Any]:
        decode.script.run = "half"
        async with _running(decode, *more, **settings) as client:
            answer = completing(client)
            await half_sent(client)
            yield client, answer

    return opened


@pytest.fixture
def handing_off() -> Any:
    """`async with handing_off(decode, prefill, ...) as (client, answer)`: both nodes have their job
    for one request's hand-off, and `prefill` does not answer."""

    @asynccontextmanager
    async def opened(decode: FakeNode, prefill: FakeNode, **settings: Any) -> AsyncIterator[Any]:
        prefill.script.prefill = "silent"
        async with _running(decode, prefill, handoff="always", **settings) as client:
            answer = completing(client)
            await until(lambda: prefill.got_of(PrefillJob) and decode.got_of(RunJob))
            yield client, answer

    return opened


@pytest.fixture
async def decode() -> AsyncIterator[FakeNode]:
    async with FakeNode("decode-0", "decode") as node:
        yield node


@pytest.fixture
async def prefill() -> AsyncIterator[FakeNode]:
    async with FakeNode("prefill-0", "prefill") as node:
        yield node


@pytest.fixture
async def other() -> AsyncIterator[FakeNode]:
    """A second decode node."""
    async with FakeNode("decode-1", "decode") as node:
        yield node
