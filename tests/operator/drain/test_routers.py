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
from baton_operator.drain.steps import DrainAnswer, DrainOutcome

pytestmark = pytest.mark.integration

TOKEN = "70ce7bb0"


class ReceivedCall(NamedTuple):
    path: str
    token: str
    body: Any


class FakeRouters:
    """Stands in for all routers of a pool; each has its own address and all share one port."""

    def __init__(self) -> None:
        self.received: list[ReceivedCall] = []
        self.statuses: dict[str, int] = {}

    async def answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        token = request.headers["Authorization"]
        self.received.append(ReceivedCall(request.path, token, json.loads(text) if text else None))
        status = self.statuses.get(str(request.url.host), 200)
        return web.json_response({"error": {"message": "two  lines\nof text"}}, status=status)


@asynccontextmanager
async def fake_routers(*hosts: str) -> AsyncIterator[tuple[FakeRouters, Routers]]:
    servers, app = FakeRouters(), web.Application()
    app.router.add_post("/nodes/{node}/{act}", servers.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    for host in hosts:
        await web.TCPSite(runner, host, port).start()
    routers = Routers(port, answer_s=20.0)
    try:
        yield servers, routers
    finally:
        await routers.close()
        await runner.cleanup()


async def test_every_router_gets_the_drain_with_the_link_token_and_the_deadline() -> None:
    hosts = ("127.0.0.1", "127.0.0.2")
    async with fake_routers(*hosts) as (servers, routers):
        assert (await routers.drain_node(hosts, TOKEN, "node-1", LeaveTerms())).outcome == "taken"
    body = {"deadline_s": 60, "reason": "scale-down"}
    assert servers.received == [ReceivedCall("/nodes/node-1/drain", f"Bearer {TOKEN}", body)] * 2


async def test_the_drain_of_an_old_node_names_its_replacement() -> None:
    async with fake_routers("127.0.0.1") as (servers, routers):
        await routers.drain_node(["127.0.0.1"], TOKEN, "node-1", LeaveTerms(600, "0a1b2c"))
    body = {"deadline_s": 600, "reason": "roll-out", "replaced_by": "0a1b2c"}
    assert servers.received == [ReceivedCall("/nodes/node-1/drain", f"Bearer {TOKEN}", body)]


async def test_a_resume_is_sent_to_the_router() -> None:
    async with fake_routers("127.0.0.1") as (servers, routers):
        assert (await routers.resume_node(["127.0.0.1"], TOKEN, "node-1")).outcome == "taken"
    assert servers.received == [ReceivedCall("/nodes/node-1/resume", f"Bearer {TOKEN}", None)]


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
async def test_the_best_of_several_answers_counts(
    first: int, second: int, outcome: DrainOutcome
) -> None:
    async with fake_routers("127.0.0.1", "127.0.0.2") as (servers, routers):
        servers.statuses = {"127.0.0.1": first, "127.0.0.2": second}
        answers = [
            await routers.drain_node(["127.0.0.1", "127.0.0.2"], TOKEN, "node-1", LeaveTerms()),
            await routers.resume_node(["127.0.0.1", "127.0.0.2"], TOKEN, "node-1"),
        ]
    assert [answer.outcome for answer in answers] == [outcome, outcome]


async def test_a_refusal_has_the_router_s_message_in_one_line() -> None:
    async with fake_routers("127.0.0.1") as (servers, routers):
        servers.statuses = {"127.0.0.1": 403}
        result = await routers.drain_node(["127.0.0.1"], TOKEN, "node-1", LeaveTerms())
    assert result.message.startswith("the router at 127.0.0.1:")
    assert result.message.endswith("answered 403: two lines of text")


async def test_a_drain_without_a_ready_router_fails() -> None:
    routers = Routers()
    assert await routers.drain_node([], TOKEN, "node-1", LeaveTerms()) == DrainAnswer(
        "failed", "no router is ready to drain or resume the node"
    )
    await routers.close()


async def test_a_silent_router_fails_the_drain_at_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        routers = Routers(port, answer_s=0.2)
        result = await routers.drain_node(["127.0.0.1"], TOKEN, "node-1", LeaveTerms())
        await routers.close()
    assert result == DrainAnswer(
        "failed", f"the router at 127.0.0.1:{port} did not answer within 0.2 s"
    )


async def test_the_message_about_an_unreachable_router_has_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    routers = Routers(port)
    result = await routers.drain_node(["127.0.0.1"], TOKEN, "node-1", LeaveTerms())
    await routers.close()
    assert result.outcome == "failed"
    assert result.message.startswith(f"the router at 127.0.0.1:{port}: ")


@asynccontextmanager
async def raw(answer: bytes, endless: bytes = b"") -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run a server in place of a router. It sends `answer` to each request, and then repeats
    `endless`. Yield its port and the requests that it has received."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            received.append(await reader.read(1 << 16))
            writer.write(answer)
            while endless:
                writer.write(endless)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], received


async def drained(port: int) -> DrainAnswer:
    routers = Routers(port, answer_s=60.0)
    try:
        return await routers.drain_node(["127.0.0.1"], TOKEN, "node-1", LeaveTerms())
    finally:
        await routers.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    ("answer", "endless"),
    [
        (HEAD + b"\r\n", b"x" * (1 << 20)),
        (HEAD + b"Content-Length: 10737418240\r\n\r\n", b"x" * (1 << 20)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"),
        (HEAD, b"X-More: yes\r\n" * 1000),
        (HEAD, b"x" * (1 << 20)),
    ],
    ids=["a body", "a long body", "chunks", "headers", "a header"],
)
async def test_only_a_limited_part_of_a_router_s_answer_is_read(
    answer: bytes, endless: bytes
) -> None:
    await check_limited(answer, endless)


async def test_only_a_limited_part_of_a_compressed_answer_is_read() -> None:
    body = gzip.compress(b"0" * (256 << 20))
    length = b"Content-Length: %d\r\n" % len(body)
    await check_limited(HEAD + b"Content-Encoding: gzip\r\n" + length + b"\r\n" + body, b"")


async def check_limited(answer: bytes, endless: bytes) -> None:
    async with raw(answer, endless) as (port, _):
        tracemalloc.start()
        try:
            result = await drained(port)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()
    assert "did not answer within" not in result.message
    assert len(result.message) < 1000


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed_and_the_token_goes_nowhere_else(status: int) -> None:
    async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (other, received):
        head = b"HTTP/1.1 %d Moved\r\nLocation: http://127.0.0.1:%d/\r\n" % (status, other)
        async with raw(head + b"Content-Length: 0\r\n\r\n") as (port, _):
            result = await drained(port)
    assert result.outcome == "failed"
    assert received == []


async def test_the_cookies_of_a_router_are_not_sent_back() -> None:
    head = b"HTTP/1.1 200 OK\r\nSet-Cookie: who=operator\r\nConnection: close\r\n"
    async with raw(head + b"Content-Length: 0\r\n\r\n") as (port, received):
        routers = Routers(port, answer_s=60.0)
        for _ in range(2):
            await routers.resume_node(["127.0.0.1"], TOKEN, "node-1")
        await routers.close()
    assert len(received) == 2
    assert not any(b"who=operator" in one for one in received)
