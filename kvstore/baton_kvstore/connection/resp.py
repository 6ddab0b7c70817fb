"""A blocking RESP2 connection for large values: one thread, one request in flight.

Why not redis-py: it copies a value twice on the way out and builds a `bytes` on the way in. Here a
SET is sent from the caller's memory, and a GET received into it, though it may lie in pieces, each
in one call of the kernel where the server keeps up: between two calls a thread has to get Python's
lock back, which in a node that computes takes longer than the bytes. Small replies are parsed by
hiredis (ReplyReader); a value's head is parsed here, since hiredis would copy the value.

In: an `Endpoint`, commands, an absolute deadline (time.monotonic()) per operation.
Out: replies, or an error of the StoreUnavailable branch. After LinkBroken, LinkTimeout or
ProtocolBroken the connection is closed, since what it holds is unknown; after ServerRefused it is
good for more. Only `abort()` may be called from another thread.


"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import hiredis

from baton_kvstore.connection.endpoint import Endpoint
from baton_kvstore.errors import (
    LinkBroken,
    LinkTimeout,
    ProtocolBroken,
    ServerRefused,
    ValueTooLong,
)

Reply = bytes | int | None | list[bytes | None]

MOST_BYTES = 256 << 20
# hiredis allocates a list when it has read its head, also within another list: at 8 bytes for each
# item that the head promises, and it takes 2 s to free 500 million. So a head of more digits than
# these is not shown to it.
MOST_ITEMS_DIGITS = 6
LONGEST_STRING_DIGITS = 7  # of a reply that is one string
LIST_HEADS = (b"\r\n*", b"\r\n>")
OVERLAP = len(LIST_HEADS[0]) + MOST_ITEMS_DIGITS  # a head may come in two pieces
STRINGS = {bytes, type(None)}


def pack(*args: bytes) -> bytes:
    """A command as it is sent."""
    parts = [b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args]
    return b"*%d\r\n%b" % (len(args), b"".join(parts))


class ReplyReader:
    """One reply of a Redis server, from pieces as they come, parsed by hiredis.

    In: bytes of a RESP2 reply: a line, a number, a string, or a list of strings. Out: the reply,
    or an error of the StoreUnavailable branch. The server need not be trusted: what is read of a
    reply, and the memory that it takes, is bounded. Large values do not come through here.

    One reply of at most `most_bytes`. `label` names the server in errors.
    """

    def __init__(self, label: str, most_bytes: int = MOST_BYTES) -> None:
        self._label = label
        self._left = most_bytes
        self._parser = hiredis.Reader()
        self._before = b"\r\n"  # the end of what has come before
        self.reply: Reply = None

    def feed(self, piece: bytes) -> bool:
        """True once `reply` is there. Raise ServerRefused for an error reply, ProtocolBroken for
        what is none, or is longer than allowed."""
        self._left -= len(piece)
        if self._left < 0:
            raise ProtocolBroken(f"{self._label} sent more than is read of it")
        self._check_heads(piece)
        try:
            self._parser.feed(piece)
            reply = self._parser.gets()
        except hiredis.ProtocolError as error:
            raise ProtocolBroken(f"{self._label}: not a Redis reply: {error}") from error
        if reply is False:
            return False
        if self._parser.has_data():
            raise ProtocolBroken(f"{self._label} sent more than was asked for")
        self.reply = self._checked(reply)
        return True

    def _check_heads(self, piece: bytes) -> None:
        seen = self._before + piece
        self._before = seen[-OVERLAP:]
        long = len(piece) > LONGEST_STRING_DIGITS and piece[1 : 2 + LONGEST_STRING_DIGITS].isdigit()
        if seen.startswith(b"\r\n$") and long and len(seen) == len(piece) + 2:
            raise ProtocolBroken(f"{self._label}: a string that is too long: {piece!r:.60}")
        for head in LIST_HEADS:
            at = seen.find(head)
            while at >= 0:
                digits = seen[at + len(head) : at + len(head) + MOST_ITEMS_DIGITS + 1]
                if len(digits) > MOST_ITEMS_DIGITS and digits.isdigit():
                    raise ProtocolBroken(f"{self._label}: a list that is too long: {digits!r}...")
                at = seen.find(head, at + 1)

    def _checked(self, reply: object) -> Reply:
        match reply:
            case hiredis.ReplyError():
                raise ServerRefused(f"{reply} [{self._label}]")
            case list() if set(map(type, reply)) <= STRINGS:
                return reply
            case bytes() | int() | None if not isinstance(reply, bool):
                return reply
        raise ProtocolBroken(f"{self._label}: not the reply of a command: {reply!r:.60}")


SCRATCH_BYTES = 16 << 10  # replies other than values must fit (INFO server is about 600 bytes)
HEAD_BYTES = 64  # read at most this much before a value's length is known: the rest goes in place
OLDEST_SERVER = (6, 2)  # GETEX
CRLF = b"\r\n"
# A send that gets nothing out in STALL_S returns, to look at the clock. On a unix socket the kernel
# counts that time anew for each packet it makes of a send, and a packet has at least PACKET_BYTES.
STALL_S = 0.01
PACKET_BYTES = 32 << 10
MOST_PIECES = 1024  # that the kernel takes in one call (IOV_MAX)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Who answered. `run_id` changes with each start of the server."""

    run_id: str
    version: str


def _timeval(seconds: float) -> bytes:
    """What SO_SNDTIMEO and SO_RCVTIMEO take; 0 would be for ever."""
    micros = max(1, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)


def leading(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first `count` bytes of what lies in pieces."""
    found = []
    for piece in pieces:
        found.append(piece[:count])
        count -= len(found[-1])
    return [piece for piece in found if len(piece)]


def _advance(pending: list[memoryview], count: int) -> None:
    """Take the first `count` bytes off."""
    while pending and count >= len(pending[0]):
        count -= len(pending.pop(0))
    if count:
        pending[0] = pending[0][count:]


class RespConnection:
    """One connection. `run_id` is that of the server it reached, "" while closed."""

    def __init__(self, endpoint: Endpoint, connect_timeout_s: float = 1.0) -> None:
        self._endpoint = endpoint
        self._tls = endpoint.tls_context()
        self._connect_timeout_s = connect_timeout_s
        self._socket: socket.socket | None = None
        self._scratch = bytearray(SCRATCH_BYTES)
        self._start = self._end = 0
        self._tail = memoryview(bytearray(len(CRLF)))  # of a value
        self.run_id = ""

    @property
    def label(self) -> str:
        """Which server, for messages."""
        return self._endpoint.label

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def open(self, deadline: float) -> ServerInfo:
        """Connect, log in, select the database, learn the run id."""
        self.close()
        deadline = min(deadline, time.monotonic() + self._connect_timeout_s)
        try:
            with self._errors():
                self._connect(deadline)
            self._log_in(deadline)
            info = self._identify(deadline)
        except BaseException:
            self.close()
            raise
        self.run_id = info.run_id
        return info

    def command(self, deadline: float, *args: bytes) -> Reply:
        """A small command with a small reply."""
        with self._errors():
            self._send(deadline, memoryview(pack(*args)))
            return self._read_reply(deadline)

    def put(self, deadline: float, key: bytes, value: Sequence[memoryview], ttl_ms: int) -> None:
        """SET key value PX ttl_ms, without joining the value's pieces to each other or to the
        command."""
        size = sum(map(len, value))
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size)
        ttl = b"%d" % ttl_ms
        tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        with self._errors():
            self._send(deadline, memoryview(head), *value, memoryview(tail))
            reply = self._read_reply(deadline)
            if reply != b"OK":
                raise ProtocolBroken(f"{self._endpoint.label} answered SET with {reply!r:.60}")

    def get(
        self, deadline: float, key: bytes, into: Sequence[memoryview], ttl_ms: int
    ) -> int | None:
        """GETEX key PX ttl_ms into the pieces, in order; return the value's length, or None if
        there is none. A value that they cannot hold raises ValueTooLong: it is not what was asked
        for, and is not read. After an error they hold whatever came.
        """
        with self._errors():
            self._send(deadline, memoryview(pack(b"GETEX", key, b"PX", b"%d" % ttl_ms)))
            line = self._read_line(deadline, HEAD_BYTES)
            if line[:1] == b"-":
                raise self._refusal(line)
            if line[:1] != b"$":
                raise ProtocolBroken(f"{self._endpoint.label} answered GETEX with {line!r:.60}")
            length = self._number(line)
            if length < 0:
                return None
            room = sum(map(len, into))
            if length > room:
                raise ValueTooLong(f"corrupt: {length} bytes, expected {room}")
            self._receive(deadline, *leading(into, length), self._tail)
            if self._tail != CRLF:
                raise ProtocolBroken(f"{self._endpoint.label}: a value without its end")
            return length

    def abort(self) -> None:
        """Wake a thread that is waiting on this connection; it gets LinkBroken."""
        current = self._socket
        if current is not None:
            with contextlib.suppress(OSError):
                # Not SSLSocket's own, after which a send in the other thread would be plain text.
                socket.socket.shutdown(current, socket.SHUT_RDWR)

    def close(self) -> None:
        current, self._socket = self._socket, None
        self.run_id = ""
        self._start = self._end = 0
        if current is not None:
            current.close()

    # --- opening ---------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        endpoint = self._endpoint
        timeout = max(0.001, deadline - time.monotonic())
        if endpoint.kind == "unix":
            raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket = raw
            raw.settimeout(timeout)
            raw.connect(endpoint.path)
        else:
            raw = socket.create_connection((endpoint.host, endpoint.port), timeout)
            self._socket = raw
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Socket buffers stay at the kernel's default: 1-4 MiB made puts 12 % slower (unix).
        if self._tls is not None:
            raw.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket = self._tls.wrap_socket(raw, server_hostname=endpoint.host)
        else:
            raw.settimeout(None)  # the kernel watches the time: Python would poll at each step
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(STALL_S))

    def _log_in(self, deadline: float) -> None:
        endpoint = self._endpoint
        try:
            if endpoint.username:
                user, password = endpoint.username.encode(), endpoint.password.encode()
                self.command(deadline, b"AUTH", user, password)
            elif endpoint.password:
                self.command(deadline, b"AUTH", endpoint.password.encode())
            if endpoint.db:
                self.command(deadline, b"SELECT", b"%d" % endpoint.db)
        except ServerRefused as error:
            raise ServerRefused(
                f"{error} (the login of the URL, or --redis-username and --redis-password)"
            ) from error

    def _identify(self, deadline: float) -> ServerInfo:
        reply = self.command(deadline, b"INFO", b"server")
        text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        run_id, version = fields.get("run_id", ""), fields.get("redis_version", "")
        if not run_id:
            raise ProtocolBroken(f"{self._endpoint.label} does not say its run_id: not a Redis?")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < OLDEST_SERVER:
            raise ServerRefused(
                f"OLD Redis {version} at {self._endpoint.label}; 6.2 or newer is needed"
            )
        return ServerInfo(run_id, version)

    # --- bytes -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn socket errors into ours, and close what cannot be trusted any more."""
        label = self._endpoint.label
        try:
            yield
        except (TimeoutError, BlockingIOError) as error:
            self.close()
            raise LinkTimeout(f"{label} did not answer in time") from error
        except OSError as error:
            self.close()
            plain = error.errno and not isinstance(error, ssl.SSLError)
            why = os.strerror(error.errno) if plain and error.errno else str(error)
            raise LinkBroken(f"cannot reach Redis at {label}: {why}") from error
        except (LinkBroken, ProtocolBroken):
            self.close()
            raise

    def _ready(self, deadline: float) -> tuple[socket.socket, float]:
        """The socket, and the seconds that are left."""
        current = self._socket
        if current is None:
            raise LinkBroken(f"not connected to {self._endpoint.label}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return current, left

    def _send(self, deadline: float, *parts: memoryview) -> None:
        if self._start != self._end:
            raise ProtocolBroken(f"{self._endpoint.label} sent more than was asked for")
        pending = [part for part in parts if len(part)]
        while pending:
            _advance(pending, self._send_some(deadline, pending))

    def _send_some(self, deadline: float, pending: list[memoryview]) -> int:
        """All of it as a rule. A call is given no more than can go out by the deadline with each
        packet as late as possible."""
        current, left = self._ready(deadline)
        if self._tls is not None:  # an ssl socket has no sendmsg, and watches the time itself
            current.settimeout(left)
            return current.send(pending[0])
        most = max(1, int(left / STALL_S)) * PACKET_BYTES
        try:
            return current.sendmsg(leading(pending[:MOST_PIECES], most))
        except BlockingIOError:
            return 0

    def _receive_some(self, deadline: float, into: Sequence[memoryview], flags: int = 0) -> int:
        current, left = self._ready(deadline)
        if self._tls is not None:
            current.settimeout(left)
            got = current.recv_into(into[0])  # it has no recvmsg_into either
        else:
            # With MSG_WAITALL, too, it is the time of the whole call.
            current.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
            got = current.recvmsg_into(into[:MOST_PIECES], 0, flags)[0]
        if not got:
            raise LinkBroken(f"{self._endpoint.label} closed the connection")
        return got

    def _receive(self, deadline: float, *into: memoryview) -> None:
        """Fill the pieces, first with what is left in the scratch buffer."""
        pending = list(into)
        for piece in leading(into, self._end - self._start):
            piece[:] = self._scratch[self._start : self._start + len(piece)]
            self._start += len(piece)
            _advance(pending, len(piece))
        while pending:
            _advance(pending, self._receive_some(deadline, pending, socket.MSG_WAITALL))

    def _fill(self, deadline: float, limit: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        room = min(limit, SCRATCH_BYTES - self._end)
        if room <= 0:
            raise ProtocolBroken(f"{self._endpoint.label}: a reply over {SCRATCH_BYTES} bytes")
        view = memoryview(self._scratch)[self._end : self._end + room]
        self._end += self._receive_some(deadline, [view])

    def _read_line(self, deadline: float, limit: int = SCRATCH_BYTES) -> bytes:
        while True:
            stop = self._scratch.find(CRLF, self._start, self._end)
            if stop >= 0:
                line = bytes(self._scratch[self._start : stop])
                self._start = stop + 2
                if not line:
                    raise ProtocolBroken(f"{self._endpoint.label}: an empty reply")
                return line
            self._fill(deadline, limit)

    def _number(self, line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError:
            raise ProtocolBroken(f"{self._endpoint.label}: no number in {line!r:.60}") from None

    def _refusal(self, line: bytes) -> ServerRefused:
        return ServerRefused(f"{line[1:].decode(errors='replace')} [{self._endpoint.label}]")

    def _read_reply(self, deadline: float) -> Reply:
        """A small one, through the scratch buffer."""
        reader = ReplyReader(self._endpoint.label, SCRATCH_BYTES)
        while True:
            if self._start == self._end:
                self._fill(deadline, SCRATCH_BYTES)
            piece = bytes(memoryview(self._scratch)[self._start : self._end])
            self._start = self._end
            if reader.feed(piece):
                return reader.reply


READ_BYTES = 256 << 10


class AsyncResp:
    """An asyncio RESP2 connection for one thing: many small values in one reply.

    Why not redis-py here: it packs a command argument by argument, which takes longer than the
    index does, and reads replies without a bound. Here a request is bytes that the caller has made
    in one go, and hiredis parses the reply.

    In: an `Endpoint`, requests. Out: replies of at most `most_bytes`, or an error of the
    StoreUnavailable branch within `timeout_s`, however many callers wait. Nothing that the server
    says makes it ask another server (MOVED is an error like others). One request is in flight at a
    time; a connection that still owes an answer (its caller has left, or got an error) is closed,
    so that nobody gets another's.

    One connection to one server, opened when it is needed. Belongs to one event loop.

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
