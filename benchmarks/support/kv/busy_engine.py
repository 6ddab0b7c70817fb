"""A node's engine process whose connector also moves KV that belongs to no request, when asked.

    python -m benchmarks.support.kv.busy_engine FD PARENT_PID

It is `baton_cli.engine_process` with another connector: that one puts chunks and gets them back, as
many at a time as a long prompt has, between memory of a real engine's kind and the store, and notes
when the step loop comes by. The step loop, the transfer threads and the index thread are the
node's own.

In: what baton_cli.engine_process takes; bytes asked for on the meter. Out: bytes moved;
turns.notes.
"""

from __future__ import annotations

import sys
import time
from unittest.mock import patch

import torch

from baton_cli import engine_process
from baton_engine.interface import KVMemory
from baton_engine.kv.kv_pool import TorchMemory
from baton_node.engine import main as engine_main
from baton_node.store.address import StoreAddress
from baton_node.store.base import (
    ChunkCopied,
    ChunkFetched,
    ChunkPublished,
    ChunkRef,
    ChunksLookedUp,
    ConnectorEvent,
)
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.store import InboxEntry, Marker, Priority
from benchmarks.support.meter import Meter, Notes, folder

OWNER = RequestId("bench")
FLYING = 64


class BusyConnector(StoreConnector):
    """Chunk n is put from, and got into, the same blocks, in turns."""

    def __init__(self, address: StoreAddress, memory: KVMemory) -> None:
        size = memory.layout.chunk_blocks
        super().__init__(address, TorchMemory(memory.layout, FLYING * size, torch.device("cpu")))
        self._blocks = [
            tuple(BlockId(1 + n * size + i) for i in range(size)) for n in range(FLYING)
        ]
        self._chunks = [
            ChunkRef(OWNER, 0, n, BlockHash(n.to_bytes(16, "little"))) for n in range(FLYING)
        ]
        self._stored: dict[int, Marker] = {}
        self._idle = set(range(FLYING))
        self._meter = Meter(folder())
        self._turns = Notes()
        self._last = time.monotonic()

    def poll(self) -> list[ConnectorEvent]:
        """Once a turn of the step loop."""
        now = time.monotonic()
        self._turns.add(now, now - self._last)
        self._last = now
        events = super().poll()
        ours = [event for event in events if _owner(event) == OWNER]
        for event in ours:
            self._happened(event)
        self._begin_more()
        return [event for event in events if _owner(event) != OWNER] if ours else events

    def close(self) -> None:
        self._turns.write(folder() / "turns.notes")
        super().close()

    def _happened(self, event: ConnectorEvent) -> None:
        match event:
            case ChunkPublished(chunk, marker, size, reason):
                if marker is None:
                    raise RuntimeError(f"a put failed: {reason}")
                self._stored[chunk.index] = marker
                self._settled(chunk.index, size)
            case ChunkFetched(chunk, ok, size, reason):
                if not ok:
                    raise RuntimeError(f"a get failed: {reason}")
                del self._stored[chunk.index]
                self._settled(chunk.index, size)

    def _settled(self, number: int, size: int) -> None:
        self._idle.add(number)
        self._meter.move(size)

    def _begin_more(self) -> None:
        """As long as more is asked for than was moved and is moving."""
        flying = FLYING - len(self._idle)
        missing = self._meter.asked - self._meter.moved - flying * self._layout.chunk_bytes
        while self._idle and missing > 0:
            number = self._idle.pop()
            chunk, blocks = self._chunks[number], self._blocks[number]
            marker = self._stored.get(number)
            if marker is None:
                self.publish(chunk, blocks, Priority.HANDOFF)
            else:
                self.fetch(chunk, marker, blocks, Priority.HANDOFF)
            missing -= self._layout.chunk_bytes


def _owner(event: ConnectorEvent) -> RequestId:
    match event:
        case ChunkCopied() | ChunkFetched() | ChunkPublished():
            return event.chunk.request
        case ChunksLookedUp() | InboxEntry():
            return event.request


if __name__ == "__main__":
    with patch.object(engine_main, "StoreConnector", BusyConnector):
        sys.exit(engine_process.main(sys.argv[1:]))
