"""A blocking RESP2 connection for large values: one thread, one request in flight.

Why not redis-py: it copies a value twice on the way out and builds a `bytes` on the way in. Here a
SET is sent from the caller's memory, and a GET received into it, though it may lie in pieces, each
in one call of the kernel where the server keeps up: between two calls a thread has to get Python's
lock back, which in a node that computes takes longer than the bytes. Small replies are parsed by
hiredis (`replies`); a value's head is parsed here, since hiredis would copy the value.

In: an `Endpoint`, commands, an absolute deadline (time.monotonic()) per operation.
Out: replies, or an error of the StoreUnavailable branch. After LinkBroken, LinkTimeout or
ProtocolBroken the connection is closed, since what it holds is unknown; after ServerRefused it is
good for more. Only `abort()` may be called from another thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton_kvstore.connection.endpoint import Endpoint
from baton_kvstore.connection.replies import Reply, ReplyReader, pack
from baton_kvstore.errors import (
    LinkBroken,
    LinkTimeout,
    ProtocolBroken,
    ServerRefused,
    ValueTooLong,
)

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
