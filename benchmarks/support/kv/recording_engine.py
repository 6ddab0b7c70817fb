"""A node's engine process that notes when first tokens leave it and when fetched chunks are in.

    python -m benchmarks.support.kv.recording_engine FD PARENT_PID

It is `baton_cli.engine_process`; its port and its connector look at the clock besides.

In: what baton_cli.engine_process takes, requests called "handoff-<number>". Out: tokens.notes and
fetched.notes, (time, number) each.
"""

from __future__ import annotations

import socket
import sys
import time
from unittest.mock import patch

from baton_cli import engine_process
from baton_engine.interface import KVMemory
from baton_node.engine import main as engine_main
from baton_node.ipc.engine_socket import EngineSocket
from baton_node.ipc.messages import Step, ToServer
from baton_node.store.address import StoreAddress
from baton_node.store.base import ChunkFetched, ConnectorEvent
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import RequestId
from benchmarks.support.meter import Notes, folder

PREFIX = "handoff-"


def request_id(number: int) -> RequestId:
    return RequestId(f"{PREFIX}{number}")


def _number(request: RequestId) -> int:
    return int(request.removeprefix(PREFIX))


class RecordingConnector(StoreConnector):
    """Records a fetch when the step loop receives its result."""

    def __init__(self, address: StoreAddress, memory: KVMemory) -> None:
        super().__init__(address, memory)
        self._fetched = Notes()

    def poll(self) -> list[ConnectorEvent]:
        events = super().poll()
        now = time.monotonic()
        for event in events:
            if isinstance(event, ChunkFetched) and event.ok:
                self._fetched.add(now, _number(event.chunk.request))
        return events

    def close(self) -> None:
        self._fetched.write(folder() / "fetched.notes")
        super().close()


class RecordingSocket(EngineSocket):
    """Notes a token as it is sent."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._tokens = Notes()

    def send(self, record: ToServer) -> None:
        if isinstance(record, Step):
            now = time.monotonic()
            for token in record.tokens:
                self._tokens.add(now, _number(token.request))
        super().send(record)

    def close(self) -> None:
        self._tokens.write(folder() / "tokens.notes")
        super().close()


if __name__ == "__main__":
    connector = patch.object(engine_main, "StoreConnector", RecordingConnector)
    port = patch.object(engine_main, "EngineSocket", RecordingSocket)
    with connector, port:
        sys.exit(engine_process.main(sys.argv[1:]))
