"""A router on a free port before fake nodes."""

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
from tests.support.pools.failing_pool import completing, half_said
from tests.support.waiting import WAIT_S, until

# Nothing is waited for longer than need be, and a drain is answered on a slow machine too.
BOUNDS = Bounds(retry_model_s=0.05, reload_every_s=0.05, drain_answer_s=WAIT_S)


class Client:
    """Plain HTTP to one router."""

    def __init__(self, router: Router, session: aiohttp.ClientSession) -> None:
        self.router = router
        self.session = session
        self.url = f"http://127.0.0.1:{router.port}"

    async def get(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        async with self.session.get(self.url + path, headers=headers) as response:
            told = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), told

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
            told = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), told

    async def ready(self, nodes: int) -> None:
        view = self.router.view
        await until(lambda: len(list(view.ready())) == nodes)

    def dial(self, address: str) -> None:
        """As discovery does with an address that it finds."""
        self.router._table.ensure(address)

    # --- what the router says of itself -----------------------------------------------------------

    async def pool(self) -> Any:
        status, pool, _ = await self.get("/pool", self._key())
        assert status == 200, pool
        return pool

    async def node(self, name: str) -> Any:
        """One node of /pool."""
        [found] = [node for node in (await self.pool())["nodes"] if node["id"] == name]
        return found

    async def names(self) -> list[str]:
        """Of the nodes of /pool."""
        return [node["id"] for node in (await self.pool())["nodes"]]

    async def chunks(self, name: str) -> int:
        """That it takes to be in a node's cache."""
        return int((await self.node(name))["cache"]["chunks"])

    async def booked(self) -> int:
        """Requests that nodes are taken to have."""
        return sum(node["booked"]["requests"] for node in (await self.pool())["nodes"])

    async def state(self, name: str) -> str:
        return str((await self.node(name))["state"])

    async def epoch(self, name: str) -> str:
        return str((await self.node(name))["epoch"])

    async def unreachable(self) -> list[str]:
        """Addresses."""
        return [one["address"] for one in (await self.pool())["unreachable"]]

    async def figure(self, name: str) -> float:
        """The sum of a metric's rows."""
        page = await self.text("/metrics", self._key())
        rows = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, rows))

    async def unfinished(self) -> int:
        """Requests that are not over, placed or not."""
        return int((await self.pool())["totals"]["requests_running"])

    async def answering(self) -> int:
        """Calls that are being answered."""
        return int(await self.figure("baton_router_requests_running"))

    async def queued(self) -> int:
        """Calls that wait since every node is full."""
        return int(await self.figure("baton_router_admission_queue"))

    async def held(self) -> int:
        """Requests that no node has yet."""
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
        options["link_token"] = "t0ken-of-the-tests"  # it opens /pool and /metrics, too
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
    that sees all nodes."""
    return _running


@pytest.fixture
def half_answered() -> Any:
    """`async with half_answered(decode, ...) as (client, answer)`: the router has half of an answer
    to a request, and `decode` says no more of it."""

    @asynccontextmanager
    async def opened(decode: FakeNode, *more: FakeNode, **settings: Any) -> AsyncIterator[Any]:
        decode.script.run = "half"
        async with _running(decode, *more, **settings) as client:
            answer = completing(client)
            await half_said(client)
            yield client, answer

    return opened


@pytest.fixture
def handing_off() -> Any:
    """`async with handing_off(decode, prefill, ...) as (client, answer)`: each of the two nodes has
    its job of one hand-off, and `prefill` does not answer."""

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
