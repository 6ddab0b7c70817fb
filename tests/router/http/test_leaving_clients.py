"""A client that closes its connection in any phase ends its request on the router and all nodes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton_protocol.link import Abort, PrefillJob, RunJob
from tests.router import pools
from tests.support.clients.raw_http import JSON_TYPE, raw_request
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration


@asynccontextmanager
async def connected(client: pools.Client, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request over a bare connection that reads nothing by itself. Leaving the block closes
    the connection."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(link, ("127.0.0.1", client.router.port))
    reader, writer = await asyncio.open_connection(sock=link, limit=1024)
    body = json.dumps({"prompt": "x", **fields}).encode()
    headers = {"Host": "localhost", "Content-Type": JSON_TYPE}
    writer.write(raw_request("POST", "/v1/completions", headers, body))
    try:
        yield reader
    finally:
        writer.close()


async def until_freed(client: pools.Client, *nodes: FakeNode) -> None:
    """Wait until the router has nothing left of the request and each node got an abort."""
    await until_is(client.unfinished, 0)
    await until_is(client.answering, 0)
    await until(lambda: all(node.got_of(Abort) for node in nodes))
    assert await client.booked() == 0


async def test_a_disconnect_while_the_request_waits_for_a_node_frees_it(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await decode.say_load("draining")
        await client.ready(0)
        for stream in (True, False):
            async with connected(client, stream=stream):
                await until_is(client.unfinished, 1)
            await until_freed(client)
        await decode.say_load("ready")
        await client.ready(1)
        await client.post("/v1/completions", {"prompt": "y"})
        prompts = [bytes(job.request.prompt_ids) for job in decode.got_of(RunJob)]
    assert prompts == [b"y"]


async def test_a_disconnect_during_a_hand_off_frees_both_nodes(
    decode: FakeNode, prefill: FakeNode
) -> None:
    prefill.script.prefill = "silent"
    async with pools.running(decode, prefill, handoff="always") as client:
        for stream in (True, False):
            async with connected(client, stream=stream):
                await until(lambda: prefill.got_of(PrefillJob) and decode.got_of(RunJob))
            await until_freed(client, prefill, decode)
            prefill.got.clear()
            decode.got.clear()


async def test_a_disconnect_before_the_first_token_frees_the_node(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode) as client:
        for stream in (True, False):
            async with connected(client, stream=stream):
                await until_is(client.unfinished, 1)
            await until_freed(client, decode)
            decode.got.clear()


async def test_a_disconnect_between_keep_alives_frees_the_node(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode, keepalive_s=0.02) as client:
        async with connected(client, stream=True) as reader:
            await reader.readuntil(b": waiting")
        await until_freed(client, decode)


async def test_a_disconnect_mid_stream_frees_the_node(decode: FakeNode) -> None:
    decode.script.run = "half"
    async with pools.running(decode) as client:
        async with connected(client, stream=True) as reader:
            await reader.readuntil(b'"text":')
        await until_freed(client, decode)


async def test_a_disconnect_while_the_router_waits_for_the_client_to_read_frees_the_node(
    decode: FakeNode,
) -> None:
    decode.script.run, decode.script.reply = "half", b"x" * 240
    async with pools.running(decode) as client:
        async with connected(client, stream=True, n=128, max_tokens=240, logprobs=5):
            server: Any = client.router._server
            [connection] = server.runner.server.connections
            # Above asyncio's limit: the handler waits in the middle of an answer.
            await until(lambda: connection.transport.get_write_buffer_size() > 1 << 16)
            assert await client.unfinished() == 1
        await until_freed(client, decode)
