"""The step loop's end of the socketpair to the server process.

In: bytes from the server. Out: frames in both directions. receive() never blocks. send() blocks
while the server does not read, which bounds the number of unread frames.

    EngineSocketClosed   the server process is gone; the engine process must end too
"""

from __future__ import annotations

import socket

from baton_node.ipc.framing import Unpacker, pack
from baton_node.ipc.messages import ToEngine, ToServer, to_engine_codec, to_server_codec

READ_BYTES = 1 << 18


class EngineSocketClosed(Exception):
    """The server process has closed its end or is gone."""


class EngineSocket:
    """Exchanges frames over a connected stream socket, which it owns and closes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._unpacker = Unpacker()
        self._incoming = to_engine_codec()
        self._outgoing = to_server_codec()

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[ToEngine]:
        """Return the frames that have arrived, without blocking. Raise EngineSocketClosed if the
        server is gone."""
        return self._read(socket.MSG_DONTWAIT)

    def wait(self) -> list[ToEngine]:
        """Like receive(), but block until at least one frame has arrived."""
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
