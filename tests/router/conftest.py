"""A router on a free port before fake nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from baton_router.service import Router
from baton_router.settings import Bounds, RouterSettings
from tests.support.nodes.fake_node import FakeNode
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


@asynccontextmanager
async def _running(
    *nodes: FakeNode, bounds: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Client]:
    options: dict[str, Any] = {"port": 0, "reconnect_max_s": 0.1}
    options["nodes"] = tuple(node.address for node in nodes)
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
