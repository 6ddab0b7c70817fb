"""An asyncio RESP2 connection for one thing: many small values in one reply.

Why not redis-py here: it packs a command argument by argument and reads a reply item by item from
its stream, which takes longer than the index does. Here a request is bytes that the caller has made
in one go, and a reply's items are cut from what was read.

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
from baton_kvstore.connection.resp import CRLF, Reply
from baton_kvstore.errors import LinkBroken, LinkTimeout, ProtocolBroken, ServerRefused

READ_BYTES = 256 << 10
MOST_ITEMS = 1 << 20
LONGEST_ITEM = 1 << 20
MOST_BYTES = 256 << 20
MISS = b"$-1\r\n"


def pack(*args: bytes) -> bytes:
    """A command as it is sent."""
    parts = [b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args]
    return b"*%d\r\n%b" % (len(args), b"".join(parts))


class ReplyReader:
    """One reply, from pieces as they come: a line, a string, or a list of strings."""

    def __init__(self, label: str, most_bytes: int = MOST_BYTES) -> None:
        self._label = label
        self._left = most_bytes
        self._data = b""
        self._at = 0
        self._missing = -1  # items of a list; -1: not begun
        self._items: list[bytes | None] = []
        self._is_list = False
        self.reply: Reply = None

    def feed(self, piece: bytes) -> bool:
        """True once `reply` is there. Raise ServerRefused for an error reply, ProtocolBroken for
        what is none, or is longer than allowed."""
        self._left -= len(piece)
        if self._left < 0:
            raise ProtocolBroken(f"{self._label} sent more than is read of it")
        self._data = self._data[self._at :] + piece if self._data else piece
        self._at = 0
        if self._missing < 0 and not self._begin():
            return False
        self._cut()
        if self._missing > 0:
            return False
        if self._at != len(self._data):
            raise ProtocolBroken(f"{self._label} sent more than was asked for")
        if self._is_list:
            self.reply = self._items
        elif self._items:
            self.reply = self._items[0]
        return True

    def _begin(self) -> bool:
        stop = self._data.find(CRLF)
        if stop < 0:
            return False
        line, kind = self._data[:stop], self._data[:1]
        if kind == b"$":  # left for _cut
            self._missing = 1
            return True
        self._at, self._missing = stop + 2, 0
        if kind == b"*":
            self._is_list, self._missing = True, self._number(line, MOST_ITEMS)
        elif kind == b"-":
            raise ServerRefused(f"{line[1:].decode(errors='replace')} [{self._label}]")
        elif kind == b"+":
            self.reply = line[1:]
        else:
            raise ProtocolBroken(f"{self._label}: not a Redis reply: {line!r:.60}")
        return True

    def _cut(self) -> None:
        """Items off the data, as far as it goes."""
        data, at, items = self._data, self._at, self._items
        wanted = len(items) + self._missing
        while len(items) < wanted:
            if data.startswith(MISS, at):
                items.append(None)
                at += len(MISS)
                continue
            stop = data.find(CRLF, at)
            if stop < 0:
                break
            head = data[at : stop + 2]
            if head[:1] != b"$":
                raise ProtocolBroken(f"{self._label}: no string in a list: {head!r:.60}")
            skip = len(head)
            width = skip + self._number(head[:-2], LONGEST_ITEM) + 2
            end = at + width * _alike(data, at, head, width, wanted - len(items))
            if end == at:
                break
            items += [data[start + skip : start + width - 2] for start in range(at, end, width)]
            at = end
        self._at, self._missing = at, wanted - len(items)

    def _number(self, line: bytes, most: int) -> int:
        text = line[1:]
        if text.isdigit() and (number := int(text)) <= most:
            return number
        raise ProtocolBroken(f"{self._label}: no number up to {most} in {line!r:.60}")


def _alike(data: bytes, at: int, head: bytes, width: int, most: int) -> int:
    """How many whole items of this width, which begin with `head`, lie one behind the other.

    Markers of a prefix have two or three lengths in long runs. To look at each byte of a head in
    all items at once takes a quarter of the time of reading head after head.
    """
    count = min(most, (len(data) - at) // width)
    for offset, byte in enumerate(head):
        column = data[at + offset : at + count * width : width]
        count = len(column) - len(column.lstrip(bytes((byte,))))
    return count


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
