"""A client that closes its connection, in whatever phase, ends its request everywhere."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton_protocol.link import Abort, PrefillJob, RunJob
from tests.support.clients.raw_http import JSON_TYPE, raw_request
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration


@asynccontextmanager
async def connected(client: Any, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A bare connection on which a request was sent; it reads nothing by itself, and leaving the
    block closes it."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(plain, ("127.0.0.1", client.router.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
    body = json.dumps({"prompt": "x", **fields}).encode()
    headers = {"Host": "localhost", "Content-Type": JSON_TYPE}
    writer.write(raw_request("POST", "/v1/completions", headers, body))
    try:
        yield reader
    finally:
        writer.close()


async def forgotten(client: Any, *nodes: FakeNode) -> None:
    """The router has nothing left of the request, and each node was told so."""
    await until_is(client.unfinished, 0)
    await until_is(client.answering, 0)
    await until(lambda: all(node.got_of(Abort) for node in nodes))
    assert await client.booked() == 0


async def test_while_it_waits_for_a_place(running: Any, decode: FakeNode) -> None:
    async with running(decode) as client:
        await decode.say_load("draining")
        await client.ready(0)
        for stream in (True, False):
            async with connected(client, stream=stream):
                await until_is(client.unfinished, 1)
            await forgotten(client)
        await decode.say_load("ready")
        await client.ready(1)
        await client.post("/v1/completions", {"prompt": "y"})
        prompts = [bytes(job.request.prompt_ids) for job in decode.got_of(RunJob)]
    assert prompts == [b"y"]


async def test_in_a_hand_off(running: Any, decode: FakeNode, prefill: FakeNode) -> None:
    prefill.script.prefill = "silent"
    async with running(decode, prefill, handoff="always") as client:
        async with connected(client, stream=True):
            await until(lambda: prefill.got_of(PrefillJob) and decode.got_of(RunJob))
        await forgotten(client, prefill, decode)


async def test_before_the_first_token(running: Any, decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with running(decode) as client:
        for stream in (True, False):
            async with connected(client, stream=stream):
                await until_is(client.unfinished, 1)
            await forgotten(client, decode)
            decode.got.clear()


async def test_between_comments(running: Any, decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with running(decode, keepalive_s=0.02) as client:
        async with connected(client, stream=True) as reader:
            await reader.readuntil(b": waiting")
        await forgotten(client, decode)


async def test_in_mid_stream(running: Any, decode: FakeNode) -> None:
    decode.script.run = "half"
    async with running(decode) as client:
        async with connected(client, stream=True) as reader:
            await reader.readuntil(b'"text":')
        await forgotten(client, decode)


async def test_while_the_router_waits_for_it_to_read(running: Any, decode: FakeNode) -> None:
    decode.script.run, decode.script.reply = "half", b"x" * 240
    async with running(decode) as client:
        async with connected(client, stream=True, n=128, max_tokens=240, logprobs=5):
            [connection] = client.router._server.runner.server.connections
            # Over asyncio's limit: the handler waits, with an answer half written.
            await until(lambda: connection.transport.get_write_buffer_size() > 1 << 16)
            assert await client.unfinished() == 1
        await forgotten(client, decode)
