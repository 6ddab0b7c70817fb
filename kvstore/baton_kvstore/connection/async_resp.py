"""An asyncio RESP2 connection for one thing: many small values in one reply.

Why not redis-py here: it packs a command argument by argument, which takes longer than the index
does, and reads replies without a bound. Here a request is bytes that the caller has made in one go,
and hiredis parses the reply.

In: an `Endpoint`, requests. Out: replies of at most `most_bytes`, or an error of the
StoreUnavailable branch within `timeout_s`, however many callers wait. Nothing that the server says
makes it ask another server (MOVED is an error like others). One request is in flight at a time; a
connection that still owes an answer (its caller has left, or got an error) is closed, so that
nobody gets another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from baton_kvstore.connection.endpoint import Endpoint
from baton_kvstore.connection.replies import MOST_BYTES, Reply, ReplyReader, pack
from baton_kvstore.errors import LinkBroken, LinkTimeout, ServerRefused

READ_BYTES = 256 << 10


class AsyncResp:
    """One connection to one server, opened when it is needed. Belongs to one event loop.

    `addresses` are the host's, where the caller has looked them up: no name is asked for then.
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
        """The reply to one command. What it asks may be done twice: once more on a new connection
        where an old one proved dead."""
        label = self._endpoint.label
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                return await self._ask(packed)
        except TimeoutError as error:
            raise LinkTimeout(f"{label} did not answer in time") from error
        except OSError as error:
            raise LinkBroken(f"cannot reach Redis at {label}: {error}") from error

    def close(self) -> None:
        """At once and for good: whoever waits for an answer gets LinkBroken."""
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
        """To the first of the host's addresses that listens."""
        endpoint = self._endpoint
        if endpoint.kind == "unix":
            return await asyncio.open_unix_connection(endpoint.path, limit=READ_BYTES)
        name = endpoint.host if self._tls is not None else None  # what the certificate is for
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
        words = [endpoint.password] if endpoint.password else []
        words = [endpoint.username, endpoint.password] if endpoint.username else words
        if words:
            login = [word.encode() for word in words]
            await self._exchange(reader, writer, pack(b"AUTH", *login))
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
