"""A stream whose client reads single bytes: fast, slowly, or until it is gone."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton_protocol.link import Abort, RunJob
from tests.router import pools
from tests.support.clients.raw_http import JSON_TYPE, raw_request
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

REPLY = b'A "quoted" line\nand \xe2\x82\xac: ' + b"x" * 30
END = b"\r\n0\r\n\r\n"  # of the answer, after its last chunk
PAUSES = {"fast": 0.0, "slow": 0.002}
PAUSE_EVERY = 61  # bytes: no divisor of an event's size, so pauses are anywhere within events
STREAM_BYTES = 4000  # about as many as half of the reply takes


@contextmanager
def bare_socket() -> Iterator[socket.socket]:
    """It holds only a few bytes that nobody has read."""
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.setblocking(False)
        yield link


async def ask(link: socket.socket, client: pools.Client) -> None:
    if link.getsockname()[1] == 0:
        await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", client.router.port))
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": len(REPLY)}).encode()
    headers = {"Host": "localhost", "Content-Type": JSON_TYPE}
    request = raw_request("POST", "/v1/completions", headers, body)
    await asyncio.get_running_loop().sock_sendall(link, request)


async def read_bytes(link: socket.socket, count: int, pause_s: float = 0.0) -> bytes:
    """Up to `count` bytes, one at a time; to the end of an answer if it comes first."""
    loop, read = asyncio.get_running_loop(), bytearray()
    while len(read) < count and not read.endswith(END):
        byte = await loop.sock_recv(link, 1)
        assert byte, "the router closed the connection"
        read += byte
        if pause_s and len(read) % PAUSE_EVERY == 0:
            await asyncio.sleep(pause_s)
    return bytes(read)


def chunks_of(body: bytes) -> Iterator[bytes]:
    """The chunks of a whole body. Each has exactly its declared size."""
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        chunk, end, body = rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert (len(chunk), end) == (length, b"\r\n")
        if not length:
            assert not body
            return
        yield chunk


def text_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    *events, last, nothing = b"".join(chunks_of(body)).split(b"\n\n")
    assert (last, nothing) == (b"data: [DONE]", b"")
    found = [json.loads(event.removeprefix(b"data: ")) for event in events if event[:1] != b":"]
    assert found[-1]["choices"][0]["finish_reason"] is not None
    return "".join(event["choices"][0]["text"] for event in found)


@pytest.mark.parametrize("speed", PAUSES)
async def test_a_client_that_reads_single_bytes_gets_whole_events_in_order(
    decode: FakeNode, speed: str
) -> None:
    decode.script.reply = REPLY
    async with pools.running(decode, keepalive_s=0.02) as client:
        with bare_socket() as link:
            for _ in range(2):  # the connection stays usable
                await ask(link, client)
                answer = await read_bytes(link, 1 << 20, PAUSES[speed])
                assert text_of(answer) == REPLY.decode()
        await until_is(client.answering, 0)


async def test_a_client_that_is_gone_after_any_byte_frees_its_request(decode: FakeNode) -> None:
    """It leaves within the headers, a chunk's size, an event, and between two of them."""
    decode.script.reply, decode.script.run = REPLY, "half"
    async with pools.running(decode) as client:
        for count in (0, 1, 60, 300, *range(STREAM_BYTES // 2, STREAM_BYTES, 331)):
            with bare_socket() as link:
                await ask(link, client)
                await until(lambda: decode.got_of(RunJob))
                assert len(await read_bytes(link, count)) == count
            await until_is(client.unfinished, 0)
            await until_is(client.answering, 0)
            await until(lambda: decode.got_of(Abort))
            assert await client.booked() == 0
            decode.got.clear()
