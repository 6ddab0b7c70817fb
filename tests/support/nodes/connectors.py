"""A connector over the pool of a simulated engine, or other memory, with waits for its events.

In: a store. Out: blocks to fill and read, the calls of a step loop, and the resulting events.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from baton_engine.interface import KVMemory
from baton_engine.sim.build import SimSettings, build_sim
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.markers import Index
from baton_node.store.address import StoreAddress
from baton_node.store.base import (
    ChunkFetched,
    ChunkPublished,
    ChunkRef,
    ChunksLookedUp,
    ConnectorEvent,
)
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import BlockHash, BlockId, Epoch, NodeId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.policies import StoreCare
from baton_protocol.store import Marker, Priority

SETTINGS = SimSettings(chunk_blocks=4, num_blocks=32)
PATIENCE_S = 120.0
E = TypeVar("E", bound=ConnectorEvent)


class PlainMemory:
    """KV memory of any layout in one piece of memory. Its head shards are parts of a block's bytes.
    Only with `direct` can a socket reach them."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, direct: bool = False) -> None:
        self.layout = layout
        self._direct = direct and layout.kv_shards == 1
        size = layout.block_bytes
        data = memoryview(bytearray((num_blocks + 1) * size))
        self.blocks = [data[block * size : (block + 1) * size] for block in range(num_blocks + 1)]

    def read(
        self, blocks: Sequence[BlockId], into: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        for piece, part in self._pairs(blocks, into, shard):
            piece[:] = part

    def write(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int = 0, group: int = 0
    ) -> None:
        for piece, part in self._pairs(blocks, data, shard):
            part[:] = piece

    def views(self, blocks: Sequence[BlockId]) -> Sequence[memoryview] | None:
        return [self.blocks[block] for block in blocks] if self._direct else None

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        raise NotImplementedError

    def _pairs(
        self, blocks: Sequence[BlockId], data: memoryview, shard: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """The pieces of `data`, each with the block's memory that it belongs to."""
        size = self.layout.block_bytes // self.layout.kv_shards
        assert len(data) == len(blocks) * size
        for place, block in enumerate(blocks):
            part = self.blocks[block][shard * size : (shard + 1) * size]
            yield data[place * size : (place + 1) * size], part


class Harness:
    """A connector over the pool of a simulated engine or over `memory`, and the events that it
    reported."""

    def __init__(
        self,
        store: EmbeddedStore,
        settings: SimSettings = SETTINGS,
        *,
        memory: KVMemory | None = None,
        care: StoreCare = "apply",
        connect: Callable[[str, str], Index] = Index,
        tuning: Tuning | None = None,
    ) -> None:
        self.engine = build_sim(settings)
        self.memory = memory or self.engine.memory
        self.block_bytes = self.memory.layout.block_bytes
        self.connector = StoreConnector(
            StoreAddress(
                index_url=store.index_url,
                data_urls=store.data_urls,
                pool="default",
                node=NodeId("n0"),
                epoch=Epoch("e0"),
                fingerprint=self.engine.info.fingerprint,
                settings=care,
            ),
            self.memory,
            connect,
            tuning,
        )
        self.connector.start()
        self.events: list[ConnectorEvent] = []

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll events until `condition` holds, sleeping on the file descriptor as the step loop
        does."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0
            select.select([self.connector.fileno()], [], [], left)
            self.events += self.connector.poll()

    def last(self, kind: type[E]) -> E | None:
        return next((e for e in reversed(self.events) if isinstance(e, kind)), None)

    def fill(self, block: int, value: int) -> None:
        data = bytearray([value]) * self.block_bytes
        self.memory.write([BlockId(block)], memoryview(data))

    def read(self, block: int) -> set[int]:
        return set(self.raw(block))

    def raw(self, block: int) -> bytes:
        """The block's bytes, shard by shard."""
        shards = self.memory.layout.kv_shards
        data = bytearray(self.block_bytes)
        size = self.block_bytes // shards
        for shard in range(shards):
            piece = memoryview(data)[shard * size : (shard + 1) * size]
            self.memory.read([BlockId(block)], piece, shard)
        return bytes(data)

    def next(self, kind: type[E]) -> E:
        """Wait for an event of this kind, remove it and return it."""
        self.until(lambda: self.last(kind) is not None)
        event = next(event for event in self.events if isinstance(event, kind))
        self.events.remove(event)
        return event

    def try_publish(self, name: bytes, blocks: Sequence[int] = (1, 2, 3, 4)) -> ChunkPublished:
        self.put(name, blocks)
        return self.next(ChunkPublished)

    def put(
        self,
        name: bytes,
        blocks: Sequence[int] = (1, 2, 3, 4),
        priority: Priority = Priority.HANDOFF,
        inbox: tuple[str, str] | None = None,
    ) -> None:
        """Start to publish a chunk, without waiting."""
        self.connector.publish(ref(name), [BlockId(block) for block in blocks], priority, inbox)

    def publish(self, name: bytes, blocks: Sequence[int] = (1, 2, 3, 4)) -> Marker:
        event = self.try_publish(name, blocks)
        assert event.marker is not None, event.reason
        return event.marker

    def fetch(self, name: bytes, marker: Marker, blocks: Sequence[int]) -> ChunkFetched:
        self.get(name, marker, blocks)
        return self.next(ChunkFetched)

    def get(self, name: bytes, marker: Marker, blocks: Sequence[int]) -> None:
        targets = [BlockId(block) for block in blocks]
        self.connector.fetch(ref(name), marker, targets, Priority.PREFIX)

    def look_up(self, *names: bytes) -> tuple[Marker | None, ...]:
        self.connector.lookup(RequestId("r"), 1, [ref(name).hash for name in names])
        return self.next(ChunksLookedUp).markers

    def close(self) -> None:
        self.connector.close()


def ref(name: bytes, index: int = 0) -> ChunkRef:
    return ChunkRef(RequestId("r"), 1, index, BlockHash(name.ljust(16, b".")))
