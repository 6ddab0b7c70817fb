"""Nodes of a KV fault testbed, with their transfers' results and the bytes of their pages.

In: a connector's events, an engine. Out: reasons and counts; pages by block hash.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import KVMemory
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.index.markers import Index
from baton_node.store.address import StoreAddress
from baton_node.store.base import ChunkFetched, ChunkPublished, ConnectorEvent
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.request import Request
from tests.support.nodes.step_loops import LoopNode

Pages = dict[BlockHash, bytes]
Wrap = Callable[[KVMemory], KVMemory]


class RecordingConnector(StoreConnector):
    """A connector that records the events it reports to the step loop."""

    def __init__(
        self,
        address: StoreAddress,
        memory: KVMemory,
        connect: Callable[[str, str], Index] = Index,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(address, memory, connect, tuning)
        self.recorded: list[ConnectorEvent] = []

    def poll(self) -> list[ConnectorEvent]:
        events = super().poll()
        self.recorded += events
        return events


class RecordingNode(LoopNode):
    """A node whose connector records its events."""

    connector: RecordingConnector

    @property
    def events(self) -> list[ConnectorEvent]:
        return self.connector.recorded

    def lost(self) -> list[str]:
        """The reasons of failed fetches."""
        return [e.reason for e in self.events if isinstance(e, ChunkFetched) and not e.ok]

    def fetched(self) -> int:
        return sum(isinstance(event, ChunkFetched) and event.ok for event in self.events)

    def refused(self) -> list[str]:
        """The reasons of failed publications."""
        return [e.reason for e in self.events if isinstance(e, ChunkPublished) and e.marker is None]

    def published(self) -> int:
        return sum(isinstance(e, ChunkPublished) and e.marker is not None for e in self.events)


def pages(node: LoopNode, request: Request) -> Pages:
    """The bytes, over all shards, of the prompt's pages in the node's prefix cache: of a block of
    tokens, the pages of all groups of layers, without those that a window has left."""
    engine = node.engine
    request = msgspec.structs.replace(request, id=RequestId(f"pages-of-{request.id}"))
    reservation = engine.reserve(request)
    assert reservation is not None, "no blocks are free to reserve the prompt"
    try:
        groups = engine.info.layout.num_groups
        blocks = [
            reservation.blocks[i * groups : (i + 1) * groups] for i in range(reservation.cached)
        ]
        return {
            name: b"".join(page(engine, block) for block in span if block)
            for name, span in zip(reservation.hashes, blocks, strict=False)
        }
    finally:
        engine.release(reservation)


def page(engine: EngineCore, block: BlockId) -> bytes:
    layout = engine.info.layout
    shards = [bytearray(layout.block_bytes // layout.kv_shards) for _ in range(layout.kv_shards)]
    for number, data in enumerate(shards):
        engine.memory.read([block], memoryview(data), number)
    return b"".join(shards)
