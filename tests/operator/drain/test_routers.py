"""Drain requests to routers over HTTP, with real servers in place of the routers."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from baton_operator.drain.marks import LeaveTerms
from baton_operator.drain.routers import Routers
from baton_operator.drain.steps import DrainAnswer, Outcome

pytestmark = pytest.mark.integration

TOKEN = "70ce7bb0"


class ReceivedCall(NamedTuple):
    path: str
    token: str
    body: Any


class Stand:
    """For all routers: they listen on addresses of their own and on one port."""

    def __init__(self) -> None:
        self.heard: list[ReceivedCall] = []
        self.statuses: dict[str, int] = {}

    async def answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        token = request.headers["Authorization"]
        self.heard.append(ReceivedCall(request.path, token, json.loads(text) if text else None))
        status = self.statuses.get(str(request.url.host), 200)
        return web.json_response({"error": {"message": "words  of\nit"}}, status=status)


@asynccontextmanager
async def standing(*hosts: str) -> AsyncIterator[tuple[Stand, Routers]]:
    stand, app = Stand(), web.Application()
    app.router.add_post("/nodes/{node}/{act}", stand.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    for host in hosts:
        await web.TCPSite(runner, host, port).start()
    routers = Routers(port, answer_s=20.0)
    try:
        yield stand, routers
    finally:
        await routers.close()
        await runner.cleanup()


async def test_every_router_is_told_with_the_link_token_and_the_deadline() -> None:
    hosts = ("127.0.0.1", "127.0.0.2")
    async with standing(*hosts) as (stand, routers):
        assert (await routers.drain(hosts, TOKEN, "node-1", LeaveTerms())).outcome == "taken"
    words = {"deadline_s": 60, "reason": "scale-down"}
    assert stand.heard == [ReceivedCall("/nodes/node-1/drain", f"Bearer {TOKEN}", words)] * 2


async def test_an_old_node_is_told_what_takes_its_place() -> None:
    async with standing("127.0.0.1") as (stand, routers):
        await routers.drain(["127.0.0.1"], TOKEN, "node-1", LeaveTerms(600, "0a1b2c"))
    words = {"deadline_s": 600, "reason": "roll-out", "replaced_by": "0a1b2c"}
    assert stand.heard == [ReceivedCall("/nodes/node-1/drain", f"Bearer {TOKEN}", words)]


async def test_a_node_is_told_to_serve_again() -> None:
    async with standing("127.0.0.1") as (stand, routers):
        assert (await routers.resume(["127.0.0.1"], TOKEN, "node-1")).outcome == "taken"
    assert stand.heard == [ReceivedCall("/nodes/node-1/resume", f"Bearer {TOKEN}", None)]


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        (200, 404, "taken"),
        (500, 200, "taken"),
        (404, 404, "unknown"),
        (400, 404, "unknown"),
        (404, 503, "unable"),
        (403, 404, "failed"),
        (503, 500, "failed"),
        (302, 302, "failed"),
    ],
)
async def test_of_several_answers_the_best_counts(
    first: int, second: int, outcome: Outcome
) -> None:
    async with standing("127.0.0.1", "127.0.0.2") as (stand, routers):
        stand.statuses = {"127.0.0.1": first, "127.0.0.2": second}
        told = [
            await routers.drain(["127.0.0.1", "127.0.0.2"], TOKEN, "node-1", LeaveTerms()),
            await routers.resume(["127.0.0.1", "127.0.0.2"], TOKEN, "node-1"),
        ]
    assert [one.outcome for one in told] == [outcome, outcome]


async def test_a_refusal_is_told_in_the_routers_words_and_in_one_line() -> None:
    async with standing("127.0.0.1") as (stand, routers):
        stand.statuses = {"127.0.0.1": 403}
        told = await routers.drain(["127.0.0.1"], TOKEN, "node-1", LeaveTerms())
    assert told.words.startswith("the router at 127.0.0.1:")
    assert told.words.endswith("answered 403: words of it")


async def test_without_a_router_nobody_is_told() -> None:
    routers = Routers()
    assert await routers.drain([], TOKEN, "node-1", LeaveTerms()) == DrainAnswer(
        "failed", "no router is ready to be told"
    )
    await routers.close()


async def test_a_router_that_is_silent_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = int(mute.getsockname()[1])
        routers = Routers(port, answer_s=0.2)
        told = await routers.drain(["127.0.0.1"], TOKEN, "node-1", LeaveTerms())
        await routers.close()
    assert told == DrainAnswer(
        "failed", f"the router at 127.0.0.1:{port} did not answer within 0.2 s"
    )


async def test_a_router_that_is_gone_is_told_of_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    routers = Routers(port)
    told = await routers.drain(["127.0.0.1"], TOKEN, "node-1", LeaveTerms())
    await routers.close()
    assert told.outcome == "failed"
    assert told.words.startswith(f"the router at 127.0.0.1:{port}: ")


@asynccontextmanager
async def raw(answer: bytes, endless: bytes = b"") -> AsyncIterator[tuple[int, list[bytes]]]:
    """The port of a server in a router's place that says this to each request, and `endless`
    without an end; and what it heard."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            heard.append(await reader.read(1 << 16))
            writer.write(answer)
            while endless:
                writer.write(endless)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], heard


async def drained(port: int) -> DrainAnswer:
    routers = Routers(port, answer_s=60.0)
    try:
        return await routers.drain(["127.0.0.1"], TOKEN, "node-1", LeaveTerms())
    finally:
        await routers.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
BOMB = gzip.compress(b"0" * (256 << 20))


@pytest.mark.parametrize(
    ("answer", "endless"),
    [
        (HEAD + b"\r\n", b"x" * (1 << 20)),
        (HEAD + b"Content-Length: 10737418240\r\n\r\n", b"x" * (1 << 20)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"),
        (HEAD, b"X-More: yes\r\n" * 1000),
        (HEAD, b"x" * (1 << 20)),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB, b""),
    ],
    ids=["a body", "a long body", "chunks", "headers", "a header", "a packed body"],
)
async def test_of_what_a_router_says_little_is_read(answer: bytes, endless: bytes) -> None:
    async with raw(answer, endless) as (port, _):
        tracemalloc.start()
        try:
            told = await drained(port)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()
    assert "did not answer within" not in told.words
    assert len(told.words) < 1000


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed_and_no_token_goes_elsewhere(status: int) -> None:
    async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (other, heard):
        head = b"HTTP/1.1 %d Moved\r\nLocation: http://127.0.0.1:%d/\r\n" % (status, other)
        async with raw(head + b"Content-Length: 0\r\n\r\n") as (port, _):
            told = await drained(port)
    assert told.outcome == "failed"
    assert heard == []


async def test_nothing_that_a_router_wants_remembered_is_sent_to_it_again() -> None:
    head = b"HTTP/1.1 200 OK\r\nSet-Cookie: who=operator\r\nConnection: close\r\n"
    async with raw(head + b"Content-Length: 0\r\n\r\n") as (port, heard):
        routers = Routers(port, answer_s=60.0)
        for _ in range(2):
            await routers.resume(["127.0.0.1"], TOKEN, "node-1")
        await routers.close()
    assert len(heard) == 2
    assert not any(b"who=operator" in one for one in heard)
