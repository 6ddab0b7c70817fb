"""A link sends its frames in order, and bounds its queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from baton_node.server.app import PING_S
from baton_node.server.links import MAX_QUEUED_BYTES, RouterLink
from baton_protocol.ids import Epoch, RequestId
from baton_protocol.link import CacheEvents, Delta, Deltas, to_router_codec
from baton_protocol.request import PositionLogprobs, TokenLogprob
from tests.support.nodes.processes import free_port

pytestmark = pytest.mark.integration


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[RouterLink, aiohttp.ClientWebSocketResponse]]:
    """The node's end and the router's end of one real WebSocket."""
    links: asyncio.Queue[RouterLink] = asyncio.Queue()

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        link = RouterLink(socket, "test")
        writer = asyncio.create_task(link.write())
        await links.put(link)
        async for _ in socket:
            pass
        link.lose()
        await writer
        return socket

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://127.0.0.1:{port}/", max_msg_size=0) as socket,
        ):
            yield await links.get(), socket
    finally:
        await runner.cleanup()


async def test_frames_arrive_in_the_order_in_which_they_were_sent() -> None:
    async with pair() as (link, socket):
        for number in range(500):
            link.send(CacheEvents(Epoch(str(number))))
        codec = to_router_codec()
        async with asyncio.timeout(120):
            frames = [codec.decode(await socket.receive_bytes()) for _ in range(500)]
        assert frames == [CacheEvents(Epoch(str(number))) for number in range(500)]


def delta(offset: int, *, scored: bool = False) -> Delta:
    logprobs = (PositionLogprobs(TokenLogprob(7, -1.0)),) if scored else ()
    return Delta(RequestId("r"), 1, 0, offset, ids=(7,), text="x", logprobs=logprobs)


async def test_deltas_that_wait_together_are_one_frame_and_overtake_no_other() -> None:
    async with pair() as (link, socket):
        for offset in range(5):  # without an await in between
            link.send(Deltas((delta(offset),)))
        link.send(CacheEvents(Epoch("after")))
        link.send(Deltas((delta(5),)))
        codec = to_router_codec()
        async with asyncio.timeout(120):
            frames = [codec.decode(await socket.receive_bytes()) for _ in range(3)]
            link.send(Deltas((delta(6),)))
            later = codec.decode(await socket.receive_bytes())
    together = Deltas(tuple(map(delta, range(5))))
    assert frames == [together, CacheEvents(Epoch("after")), Deltas((delta(5),))]
    assert later == Deltas((delta(6),))


async def test_deltas_with_logprobs_share_no_frame_with_those_of_another_step() -> None:
    steps = [Deltas((delta(offset, scored=offset == 1),)) for offset in range(3)]
    async with pair() as (link, socket):
        for step in steps:
            link.send(step)
        codec = to_router_codec()
        async with asyncio.timeout(120):
            assert [codec.decode(await socket.receive_bytes()) for _ in steps] == steps


async def test_deltas_that_nobody_reads_count_as_queued() -> None:
    async with pair() as (link, _):
        step = Deltas(tuple(map(delta, range(100))))
        sent = 0
        while link.open:
            link.send(step)
            sent += 1
        assert sent > 1000
        assert sent * len(step.items) < MAX_QUEUED_BYTES  # a delta is more than a byte


async def test_a_router_that_does_not_read_loses_its_link() -> None:
    async with pair() as (link, socket):
        piece = bytes(1 << 20)
        for _ in range((MAX_QUEUED_BYTES >> 20) + 1):
            link.send_bytes(piece)
        assert not link.open
        link.send_bytes(piece)  # dropped
        async with asyncio.timeout(120):
            while (await socket.receive()).type is aiohttp.WSMsgType.BINARY:
                pass
        assert socket.closed


def test_a_router_that_is_blocked_for_two_seconds_keeps_its_links() -> None:
    # Parsing a body of 16 MB blocks a router for 1 s. It has PING_S / 2 to answer a ping.
    assert PING_S / 2 >= 3
