"""The step loop's end of the socketpair to its server.

In: bytes of the server. Out: frames, both ways. Reading never blocks; writing blocks when the
server does not read, which bounds what an engine can pile up.

    EngineSocketClosed   the server is gone, and the engine process ends with it
"""

from __future__ import annotations

import socket
from typing import Protocol

from baton_node.ipc.messages import (
    ToEngine,
    ToServer,
    Unpacker,
    pack,
    to_engine_codec,
    to_server_codec,
)

READ_BYTES = 1 << 18


class EngineSocketClosed(Exception):
    """Nobody is at the other end any more."""


class EngineSocket(Protocol):
    """What the step loop needs of it."""

    def fileno(self) -> int: ...

    def receive(self) -> list[ToEngine]:
        """What has arrived, without blocking. Raise EngineSocketClosed when the other end is
        gone."""
        ...

    def send(self, record: ToServer) -> None: ...


class StreamEngineSocket:
    """Port over a connected stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._unpacker = Unpacker()
        self._incoming = to_engine_codec()
        self._outgoing = to_server_codec()

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[ToEngine]:
        return self._read(socket.MSG_DONTWAIT)

    def wait(self) -> list[ToEngine]:
        """Like receive(), but block until something has come."""
        while not (frames := self._read(0)):
            pass
        return frames

    def send(self, record: ToServer) -> None:
        try:
            self._socket.sendall(pack(self._outgoing.encode(record)))
        except OSError as error:
            raise EngineSocketClosed(f"the server process is gone: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def _read(self, flags: int) -> list[ToEngine]:
        try:
            data = self._socket.recv(READ_BYTES, flags)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EngineSocketClosed(f"the server process is gone: {error}") from error
        if not data:
            raise EngineSocketClosed("the server process is gone")
        return [self._incoming.decode(payload) for payload in self._unpacker.feed(data)]
