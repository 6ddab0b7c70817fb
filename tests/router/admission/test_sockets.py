"""Raw sockets: clients that do not read, and bytes that are not a valid request."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import pytest

from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import RequestId
from baton_protocol.link import Abort, Delta
from baton_router.requests.output_queue import OutputQueue
from tests.router import pools
from tests.support.clients.raw_http import JSON_TYPE, raw_request
from tests.support.nodes.fake_node import FakeNode, Script
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

KEY = "sk-planted-key"
TOKENS = 120_000  # about 200 bytes each: more than the kernel buffers


async def connect(client: pools.Client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", client.router.port))
    return await asyncio.open_connection(sock=link, limit=4096)


async def request_stream(client: pools.Client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Request a stream of TOKENS tokens and do not read it."""
    reader, writer = await connect(client)
    body = json.dumps({"prompt": "x", "max_tokens": TOKENS, "stream": True}).encode()
    headers = {"Host": "localhost", "Content-Type": JSON_TYPE}
    writer.write(raw_request("POST", "/v1/completions", headers, body))
    return reader, writer


async def answer(client: pools.Client, data: bytes) -> tuple[int, Any]:
    """Send raw bytes, and return the router's answer, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.router.port)
    async with asyncio.timeout(120):
        writer.write(data)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), json.loads(body)


def long_reply_node() -> FakeNode:
    script = Script(reply=b"x" * TOKENS)
    return FakeNode("decode-0", "decode", script, max_model_len=10**6)


async def test_an_unread_stream_ends_with_slow_client_and_others_continue() -> None:
    async with long_reply_node() as node, pools.running(node) as client:
        reader, writer = await request_stream(client)
        await until(lambda: node.got_of(Abort))
        assert await client.unfinished() == 0
        status, result, _ = await client.post("/v1/completions", {"prompt": "x"})
        assert (status, result["usage"]["completion_tokens"]) == (200, 16)
        async with asyncio.timeout(240):
            read = await reader.readuntil(b"\r\n\r\n")
            while b'"code":"slow_client"' not in read:
                part = await reader.read(1 << 16)
                assert part
                read = read[-200:] + part
        await until_is(client.answering, 0)
        writer.close()


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async with (
        long_reply_node() as node,
        pools.running(node, tunables={"cut_off_s": 0.2}) as client,
    ):
        _, writer = await request_stream(client)
        await until_is(client.answering, 1)
        await until_is(client.answering, 0)
        page = await client.text("/metrics")
        writer.close()
    assert 'baton_router_rejected_total{code="slow_client"} 1.0\n' in page


def test_an_output_queue_reports_overflow_once() -> None:
    overflows: list[int] = []
    output = OutputQueue(1, max_unread=10, overflow=lambda: overflows.append(1))
    for offset in range(30):
        output.put_delta(0, Delta(RequestId("r"), 1, 0, offset, ids=(7,)))
        assert len(overflows) == (offset >= 10)


async def test_an_output_queue_that_is_read_never_overflows() -> None:
    overflows: list[int] = []
    output = OutputQueue(1, max_unread=2, overflow=lambda: overflows.append(1))
    for offset in range(30):
        output.put_delta(0, Delta(RequestId("r"), 1, 0, offset, ids=(7, 8)))
        assert len(await output.next_batch()) == 1
    output.put_error(ErrorRecord("", ""))
    assert overflows == []


GARBAGE = [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.x\r\n\r\n",
           b"GET / HTTP/1.1\r\nno colon\r\n\r\n"]  # fmt: skip


@pytest.mark.parametrize("data", GARBAGE)
async def test_bytes_that_are_not_http_get_a_400_in_openai_s_error_shape(
    decode: FakeNode, data: bytes
) -> None:
    async with pools.running(decode) as client:
        status, result = await answer(client, data)
        assert (status, result["error"]["code"]) == (400, "malformed_request")
        assert result["error"]["type"] == "invalid_request_error"
        assert (await client.get("/health"))[0] == 200


@pytest.mark.parametrize("head", ["GET /{0} HTTP/1.1", "GET / HTTP/1.1\r\nAuthorization: {0}"])
async def test_an_overlong_head_is_a_431_that_names_the_limit_and_is_not_logged(
    decode: FakeNode, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    caplog.set_level(logging.DEBUG)
    data = (head.format(KEY + "x" * 9000) + "\r\nHost: localhost\r\n\r\n").encode()
    async with pools.running(decode) as client:
        status, result = await answer(client, data)
    assert (status, result["error"]["code"]) == (431, "headers_too_large")
    assert "8190 bytes" in result["error"]["message"]
    assert KEY not in json.dumps(result) + caplog.text + "".join(
        str(vars(record)) for record in caplog.records
    )


async def test_too_many_headers_are_refused(decode: FakeNode) -> None:
    lines = "".join(f"x-{n}: {KEY}\r\n" for n in range(500))
    async with pools.running(decode) as client:
        status, result = await answer(client, f"GET / HTTP/1.1\r\n{lines}\r\n".encode())
    assert status in (400, 431)
    assert result["error"]["code"] in ("malformed_request", "headers_too_large")
    assert KEY not in json.dumps(result)
