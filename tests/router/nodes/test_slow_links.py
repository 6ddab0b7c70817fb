"""A node that does not read: its queue of unsent frames is bounded, and its link is reopened."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from baton_protocol.ids import RequestId
from baton_protocol.link import Abort, Hello, to_router_codec
from baton_protocol.store import NodeReport
from baton_router.nodes.link import Flaw, NodeLink
from baton_router.settings import Tunables
from tests.support.nodes.fake_node import make_report
from tests.support.nodes.processes import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.integration


class Listener:
    """Accepts every link. `broken`: for each broken link, whether its node was silent."""

    def __init__(self) -> None:
        self.hellos = 0
        self.broken: list[bool] = []

    def on_hello(self, link: NodeLink, report: NodeReport) -> bool:
        self.hellos += 1
        return True

    def on_up(self, link: NodeLink) -> None: ...

    def on_frame(self, link: NodeLink, frame: object) -> None: ...

    def on_broken(self, link: NodeLink, *, silent: bool) -> None:
        self.broken.append(silent)

    def on_refused(self, link: NodeLink) -> None: ...

    def on_bad_frame(self, link: NodeLink, flaw: Flaw, why: str) -> None: ...


class Peer:
    """A node that sends hello and reads at most `reads` frames per link; `got` counts them."""

    def __init__(self, reads: int) -> None:
        self._reads = reads
        self.got = 0

    async def link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        hello = Hello(make_report("decode-0", "decode"))
        await socket.send_bytes(to_router_codec().encode(hello))
        for _ in range(self._reads):
            await socket.receive_bytes()
            self.got += 1
        await asyncio.Event().wait()
        return socket


@asynccontextmanager
async def linked(peer: Peer, listener: Listener, choked_s: float) -> AsyncIterator[NodeLink]:
    app = web.Application()
    app.router.add_get("/link", peer.link)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with aiohttp.ClientSession() as session:
        url, rng = f"http://127.0.0.1:{port}", random.Random(1)
        # A long ping interval, so no link breaks because its node is silent.
        tunables = Tunables(max_unsent_bytes=1 << 20, choked_s=choked_s, ping_s=600.0)
        link = NodeLink(url, session, listener, pause_max_s=0.1, rng=rng, tunables=tunables)
        link.start_dialling()
        try:
            await until(lambda: link.up)
            yield link
        finally:
            await link.close_link()
            await runner.cleanup()


BIG = Abort(RequestId("r" * (1 << 18)), 1)


async def test_a_node_that_does_not_read_gets_a_new_link() -> None:
    listener = Listener()
    async with linked(Peer(0), listener, choked_s=0.2) as link:
        for _ in range(160):  # 40 MiB; socket buffers hold at most a quarter of it
            link.send_frame(BIG)
        await until(lambda: listener.hellos == 2 and link.up)
        assert (listener.broken, link.idle) == ([False], True)


async def test_a_node_that_reads_may_have_more_unsent_bytes_than_the_bound() -> None:
    listener, peer = Listener(), Peer(100)
    async with linked(peer, listener, choked_s=60.0) as link:
        for _ in range(100):
            link.send_frame(BIG)
        await until(lambda: peer.got == 100)
        assert (listener.broken, link.idle) == ([], True)
