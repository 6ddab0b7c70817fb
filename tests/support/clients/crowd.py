"""Simulates many concurrent clients of one router, each on its own bare connection.

In: the router's port. Out: idle connections, streams in progress, or requests in sequence. A
`Crowd` closes its connections when its context ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from types import TracebackType

from tests.support.clients.raw_http import JSON_TYPE, raw_request

CONNECTS_AT_ONCE = 64  # below the backlog of a listening socket
ANSWER_S = 300.0
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def allow_files(count: int) -> bool:
    """Raise the open-file limit of this process and its children to `count`; False if the hard
    limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        return False
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return True


class Crowd:
    """A set of client connections; use it as `async with Crowd(port) as crowd:`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[Connection] = []
        self._connect_limit = asyncio.Semaphore(CONNECTS_AT_ONCE)

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, writer in self._connections:
            writer.close()
        for _, writer in self._connections:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def idle(self, count: int) -> None:
        """Open `count` connections that get one answer each and then idle."""
        await asyncio.gather(*(self._idle() for _ in range(count)))

    async def stream(self, count: int, max_tokens: int) -> None:
        """Start `count` streams; return when each has its first token."""
        await asyncio.gather(*(self._stream(number, max_tokens) for number in range(count)))

    async def ask(self, count: int, connections: int) -> None:
        """Request `count` one-token completions, divided evenly over `connections` connections."""
        each = count // connections
        await asyncio.gather(*(self._ask(each) for _ in range(connections)))

    async def _idle(self) -> None:
        connection = await self._connect()
        assert (
            await _exchange(connection, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ) == 200

    async def _stream(self, number: int, max_tokens: int) -> None:
        reader, writer = await self._connect()
        prompt = [1 + number % 200, 1 + number // 200, 3]
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        writer.write(_post(body))
        async with asyncio.timeout(ANSWER_S):
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"data: ")

    async def _ask(self, count: int) -> None:
        connection = await self._connect()
        request = _post({"prompt": [1, 2, 3], "max_tokens": 1})
        for _ in range(count):
            assert await _exchange(connection, request) == 200

    async def _connect(self) -> Connection:
        async with self._connect_limit:
            connection = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 12)
        self._connections.append(connection)
        return connection


def _post(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    headers = {"Host": "localhost", "Content-Type": JSON_TYPE}
    return raw_request("POST", "/v1/completions", headers, data)


async def _exchange(connection: Connection, request: bytes) -> int:
    """Send a request and return the status of its answer, which must have a content-length."""
    reader, writer = connection
    async with asyncio.timeout(ANSWER_S):
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = head.split("content-length:")[1].split("\r\n")[0]
        await reader.readexactly(int(length))
    return int(head.split()[1])
