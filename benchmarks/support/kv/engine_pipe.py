"""The server's end of an engine process, for a benchmark that is the server itself.

In: a module with the arguments of baton_cli.engine_process, NodeSettings, frames. Out: its frames.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from baton_node.ipc.framing import Unpacker, pack
from baton_node.ipc.messages import (
    EngineReady,
    Start,
    ToEngine,
    ToServer,
    to_engine_codec,
    to_server_codec,
)
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch, NodeId
from benchmarks.support.meter import FOLDER

READ_BYTES = 1 << 18
PATIENCE_S = 120.0
END_S = 15.0


class EnginePipe:
    """One engine process. Its notes go to a folder of its own in `place`."""

    def __init__(self, module: str, settings: NodeSettings, place: Path) -> None:
        self.node = NodeId(settings.node)
        self.epoch = Epoch(f"epoch-of-{settings.node}")
        self.folder = place / settings.node
        self.folder.mkdir()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(PATIENCE_S)
        self._unpacker = Unpacker()
        self._outgoing, self._incoming = to_engine_codec(), to_server_codec()
        self._frames: deque[ToServer] = deque()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, FOLDER: str(self.folder)},
                pass_fds=(theirs.fileno(),),
            )
        self.send(Start(settings, self.epoch))
        frame = self._next()
        if not isinstance(frame, EngineReady):
            raise SystemExit(f"{self.node} did not start: {frame}")
        self.ready = frame

    def send(self, record: ToEngine) -> None:
        self._socket.sendall(pack(self._outgoing.encode(record)))

    def wait_for(self, wanted: Callable[[ToServer], bool]) -> ToServer:
        """The next frame that is wanted; others are dropped."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            frame = self._next()
            if wanted(frame):
                return frame
        raise SystemExit(f"{self.node} did not send the expected frame")

    def _next(self) -> ToServer:
        while not self._frames:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise SystemExit(f"the engine process of {self.node} ended")
            for payload in self._unpacker.feed(data):
                self._frames.append(self._incoming.decode(payload))
        return self._frames.popleft()

    def close(self) -> None:
        """Its socket's end is its own; then its notes are there."""
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
