"""AsyncResp: an asyncio RESP2 connection, for requests whose reply holds many small values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from baton_kvstore.connection.endpoint import Endpoint
from baton_kvstore.connection.resp import MOST_BYTES, Reply, ReplyReader, pack
from baton_kvstore.errors import (
    LinkBroken,
    LinkTimeout,
    ServerRefused,
)

READ_BYTES = 256 << 10


class AsyncResp:
    """An asyncio RESP2 connection for requests whose reply holds many small values.

    Why not redis-py: it packs a command argument by argument, which takes longer than the index
    needs to answer, and it reads replies without a limit. Here the caller packs the request in one
    pass, and hiredis parses the reply.

    A reply may have at most `most_bytes`. A request returns or raises a StoreUnavailable error
    within `timeout_s`, even if many callers wait. Redirections are not followed: MOVED is an error
    like any other. One request is in flight at a time. If its caller is cancelled or gets an error,
    the connection is closed, so that no other caller can get its reply.

    The connection is opened on demand and belongs to one event loop. If `addresses` (the IP
    addresses of the endpoint's host) are given, the host name is not resolved.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        addresses: Sequence[str] = (),
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._endpoint = endpoint
        self._hosts = tuple(addresses) or (endpoint.host,)
        self._most_bytes = most_bytes
        self._tls = endpoint.tls_context()
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._turn = asyncio.Lock()
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._closed = False

    async def command(self, *args: bytes) -> Reply:
        return await self.request(pack(*args))

    async def request(self, packed: bytes) -> Reply:
        """Send one packed command and return its reply.

        If an existing connection proves dead, the command is sent again on a new one. So it must be
        safe to run twice.
        """
        label = self._endpoint.label
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                return await self._ask(packed)
        except TimeoutError as error:
            raise LinkTimeout(f"{label} did not answer in time") from error
        except OSError as error:
            raise LinkBroken(f"cannot reach Redis at {label}: {error}") from error

    def close(self) -> None:
        """Close for good, at once. Waiting callers get LinkBroken."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link[1].transport.abort()

    async def _ask(self, packed: bytes) -> Reply:
        while not self._closed:
            old = self._link
            try:
                reader, writer = old or await self._open()
                return await self._exchange(reader, writer, packed)
            except ServerRefused:
                raise
            except BaseException as error:
                self._drop()
                if old is None or not isinstance(error, OSError | LinkBroken):
                    raise
        raise LinkBroken(f"the connection to {self._endpoint.label} is closed")

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(self._connect_timeout_s):
            link = await self._connect()
            try:
                await self._log_in(*link)
            except BaseException:
                link[1].transport.abort()
                raise
        self._link = link
        return link

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first of the host's addresses that accepts."""
        endpoint = self._endpoint
        if endpoint.kind == "unix":
            return await asyncio.open_unix_connection(endpoint.path, limit=READ_BYTES)
        name = endpoint.host if self._tls is not None else None  # the name in the certificate
        *others, last = self._hosts
        for host in others:
            with suppress(OSError):
                return await asyncio.open_connection(
                    host, endpoint.port, ssl=self._tls, server_hostname=name, limit=READ_BYTES
                )
        return await asyncio.open_connection(
            last, endpoint.port, ssl=self._tls, server_hostname=name, limit=READ_BYTES
        )

    async def _log_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        endpoint = self._endpoint
        login = [endpoint.password] if endpoint.password else []
        login = [endpoint.username, endpoint.password] if endpoint.username else login
        if login:
            await self._exchange(reader, writer, pack(b"AUTH", *map(str.encode, login)))
        if endpoint.db:
            await self._exchange(reader, writer, pack(b"SELECT", b"%d" % endpoint.db))

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, packed: bytes
    ) -> Reply:
        writer.write(packed)
        replies = ReplyReader(self._endpoint.label, self._most_bytes)
        while True:
            piece = await reader.read(READ_BYTES)
            if not piece:
                raise LinkBroken(f"{self._endpoint.label} closed the connection")
            if replies.feed(piece):
                return replies.reply
