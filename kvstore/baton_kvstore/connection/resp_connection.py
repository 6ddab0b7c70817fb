"""RespConnection: a blocking RESP2 connection for large values.

Why not redis-py for large values: it copies a value twice to send it, and builds a `bytes` to
receive one. A RespConnection sends a SET from the caller's memory and receives a GET into it, even
if that memory is in several pieces. Each takes a single system call if the server keeps up. That
matters because a thread must reacquire the GIL after each call, which takes longer than the
transfer in a process that computes. Small replies go through a ReplyReader. The header of a value
is parsed here, since hiredis would copy the value.
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
from baton_kvstore.connection.info import parse_info
from baton_kvstore.connection.large_sends import SendTurns, bound_send_buffer
from baton_kvstore.connection.memory_pieces import drop_leading, leading
from baton_kvstore.connection.resp import Reply, ReplyReader, pack
from baton_kvstore.errors import (
    LinkBroken,
    LinkTimeout,
    ProtocolBroken,
    ServerRefused,
    ValueTooLong,
)

SCRATCH_BYTES = 16 << 10  # every reply but a value must fit (INFO server has about 600 bytes)
# Until a value's length is known, read at most this much, so that the rest can go to its
# destination.
HEAD_BYTES = 64
OLDEST_SERVER = (6, 2)  # the first version with GETEX
LOGIN = "check the login in the URL, or --redis-username and --redis-password"
OLD = "OLD"  # the code of a refusal: the server's version is too old
CRLF = b"\r\n"
# A send that makes no progress for STALL_S returns, so that the deadline is checked. On a unix
# socket the kernel restarts that timeout for each packet of a send; a packet has at least
# PACKET_BYTES.
STALL_S = 0.01
PACKET_BYTES = 32 << 10
MOST_PIECES = 1024  # the most buffers that the kernel takes in one call (IOV_MAX)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's identity. `run_id` changes with each start of the server."""

    run_id: str
    version: str


def _timeval(seconds: float) -> bytes:
    """Encode a timeout for SO_SNDTIMEO and SO_RCVTIMEO. Never 0, which means no timeout."""
    micros = max(1, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)


class RespConnection:
    """One blocking connection. It belongs to one thread; only abort() may be called from others.
    Connections to the same server share its `turns`.

    Operations take an absolute deadline by time.monotonic() and raise StoreUnavailable errors.
    After LinkBroken, LinkTimeout or ProtocolBroken the connection is closed, since its state is
    unknown. After ServerRefused it stays usable. `run_id` is the connected server's, "" while
    closed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        connect_timeout_s: float = 1.0,
        turns: SendTurns | None = None,
    ) -> None:
        self._endpoint = endpoint
        # A unix socket holds so little that there is nothing to wait for.
        self._turns = turns if turns and endpoint.kind != "unix" else SendTurns()
        self._tls = endpoint.tls_context()
        self._connect_timeout_s = connect_timeout_s
        self._socket: socket.socket | None = None
        self._scratch = bytearray(SCRATCH_BYTES)
        self._start = self._end = 0
        self._tail = memoryview(bytearray(len(CRLF)))  # receives the CRLF after a value
        self.run_id = ""

    @property
    def label(self) -> str:
        """The server's name in messages."""
        return self._endpoint.label

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def open(self, deadline: float) -> ServerInfo:
        """Connect, log in, select the database, and read the server's run id and version."""
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
        """Send a small command and return its small reply."""
        with self._errors():
            self._send(deadline, memoryview(pack(*args)))
            return self._read_reply(deadline)

    def put(self, deadline: float, key: bytes, value: Sequence[memoryview], ttl_ms: int) -> None:
        """SET key value PX ttl_ms. The pieces of the value are sent in place, not joined."""
        size = sum(map(len, value))
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size)
        ttl = b"%d" % ttl_ms
        tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        with self._errors():
            with self._turns.turn(size, self._ready(deadline)[1]):
                self._send(deadline, memoryview(head), *value, memoryview(tail))
            reply = self._read_reply(deadline)
            if reply != b"OK":
                raise ProtocolBroken(f"{self._endpoint.label} answered SET with {reply!r:.60}")

    def get(
        self, deadline: float, key: bytes, into: Sequence[memoryview], ttl_ms: int
    ) -> int | None:
        """GETEX key PX ttl_ms: receive the value into the pieces, in order.

        Return the value's length, or None if there is no value. Raise ValueTooLong, without reading
        the value, if it does not fit. After an error the content of the pieces is undefined.
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
                raise ProtocolBroken(f"{self._endpoint.label} sent a value without CRLF at its end")
            return length

    def abort(self) -> None:
        """Wake the thread that waits on this connection: its operation raises LinkBroken."""
        current = self._socket
        if current is not None:
            with contextlib.suppress(OSError):
                # Not SSLSocket.shutdown: after it, a send in the other thread would be plain text.
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
            bound_send_buffer(raw)  # a unix socket's is small: 1-4 MiB made puts 12 % slower
        if self._tls is not None:
            raw.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket = self._tls.wrap_socket(raw, server_hostname=endpoint.host)
        else:
            raw.settimeout(None)  # the kernel applies timeouts: Python would poll before each call
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
            raise ServerRefused(f"{error} ({LOGIN})") from error

    def _identify(self, deadline: float) -> ServerInfo:
        reply = self.command(deadline, b"INFO", b"server")
        fields = parse_info(reply)
        run_id, version = fields.get("run_id", ""), fields.get("redis_version", "")
        if not run_id:
            raise ProtocolBroken(f"{self._endpoint.label} reports no run_id; is it a Redis server?")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < OLDEST_SERVER:
            raise ServerRefused(
                f"{OLD} Redis {version} at {self._endpoint.label}; 6.2 or newer is needed"
            )
        return ServerInfo(run_id, version)

    # --- bytes -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate socket errors, and close the connection if its state is unknown."""
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
        """Return the socket and the seconds left. Raise TimeoutError after the deadline."""
        current = self._socket
        if current is None:
            raise LinkBroken(f"not connected to {self._endpoint.label}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return current, left

    def _send(self, deadline: float, *parts: memoryview) -> None:
        if self._start != self._end:
            raise ProtocolBroken(f"{self._endpoint.label} sent data that was not requested")
        pending = [part for part in parts if len(part)]
        while pending:
            drop_leading(pending, self._send_some(deadline, pending))

    def _send_some(self, deadline: float, pending: list[memoryview]) -> int:
        """Send `pending`, usually all of it, and return the number of bytes sent.

        One call gets no more bytes than go out by the deadline if each packet takes STALL_S.
        """
        current, left = self._ready(deadline)
        if self._tls is not None:  # an ssl socket has no sendmsg, and applies the timeout itself
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
            got = current.recv_into(into[0])  # an ssl socket has no recvmsg_into either
        else:
            # With MSG_WAITALL, too, the timeout is that of the whole call.
            current.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
            got = current.recvmsg_into(into[:MOST_PIECES], 0, flags)[0]
        if not got:
            raise LinkBroken(f"{self._endpoint.label} closed the connection")
        return got

    def _receive(self, deadline: float, *into: memoryview) -> None:
        """Fill the pieces, starting with the bytes left in the scratch buffer."""
        pending = list(into)
        for piece in leading(into, self._end - self._start):
            piece[:] = self._scratch[self._start : self._start + len(piece)]
            self._start += len(piece)
            drop_leading(pending, len(piece))
        while pending:
            drop_leading(pending, self._receive_some(deadline, pending, socket.MSG_WAITALL))

    def _fill(self, deadline: float, limit: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        room = min(limit, SCRATCH_BYTES - self._end)
        if room <= 0:
            raise ProtocolBroken(
                f"{self._endpoint.label} sent a reply of more than {SCRATCH_BYTES} bytes"
            )
        view = memoryview(self._scratch)[self._end : self._end + room]
        self._end += self._receive_some(deadline, [view])

    def _read_line(self, deadline: float, limit: int = SCRATCH_BYTES) -> bytes:
        while True:
            stop = self._scratch.find(CRLF, self._start, self._end)
            if stop >= 0:
                line = bytes(self._scratch[self._start : stop])
                self._start = stop + 2
                if not line:
                    raise ProtocolBroken(f"{self._endpoint.label} sent an empty reply")
                return line
            self._fill(deadline, limit)

    def _number(self, line: bytes) -> int:
        try:
            return int(line[1:])
        except ValueError:
            raise ProtocolBroken(f"{self._endpoint.label} sent no number: {line!r:.60}") from None

    def _refusal(self, line: bytes) -> ServerRefused:
        return ServerRefused(f"{line[1:].decode(errors='replace')} [{self._endpoint.label}]")

    def _read_reply(self, deadline: float) -> Reply:
        """Read a small reply through the scratch buffer."""
        reader = ReplyReader(self._endpoint.label, SCRATCH_BYTES)
        while True:
            if self._start == self._end:
                self._fill(deadline, SCRATCH_BYTES)
            piece = bytes(memoryview(self._scratch)[self._start : self._end])
            self._start = self._end
            if reader.feed(piece):
                return reader.reply
