"""Servers that a pool names as its index and that are no Redis, or a hostile one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class ForeignServer:
    """A server that counts its connections."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[Any]] = set()
        self.port = 0
        self.connections = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def foreign_server(serve: Serve, host: str = "127.0.0.1") -> AsyncIterator[ForeignServer]:
    one = ForeignServer(serve)
    async with await asyncio.start_server(one.accept, host, 0) as server:
        one.port = server.sockets[0].getsockname()[1]
        try:
            yield one
        finally:
            one.close()


def replies(*pieces: bytes) -> Serve:
    """Answer each request with the next of these pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            await reader.read(1 << 16)
            writer.write(piece)
            await writer.drain()
        await reader.read(1)

    return serve


def endless(first: bytes, piece: bytes) -> Serve:
    """Answer the first request with `first`, and then with `piece` without end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(first)
        for one in repeat(piece):
            writer.write(one)
            await writer.drain()

    return serve


async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(-1)


def array_reply(*values: bytes) -> bytes:
    items = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    return b"*%d\r\n%b" % (len(values), items)
