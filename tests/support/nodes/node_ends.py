"""One end of the KV exchange: a node's engine and connector, without step loop and server.

In: a store and an engine. Out: a computed prompt, whose chunks can be published from its pages,
looked up, and fetched into other pages; and a copy of the pool's memory, page by page (taken
directly, not through the transfers' own `read`).
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import KVMemory, Reservation
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.sim.memory import SimMemory
from baton_kvstore.embedded.servers import EmbeddedStore
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
from baton_protocol.ids import BlockId, Epoch, NodeId
from baton_protocol.request import Request
from baton_protocol.store import Marker, Priority
from tests.support.stores.kvstore import PATIENT, patient_index

Pages = npt.NDArray[np.uint8]  # [blocks with block 0, bytes of a block]
E = TypeVar("E", bound=ConnectorEvent)
PATIENCE_S = 120.0
STEP_LIMIT = 1000


class NodeEnd:
    """An engine with its connector: `with NodeEnd(store, name, epoch, engine) as end:`."""

    def __init__(self, store: EmbeddedStore, name: str, epoch: str, engine: EngineCore) -> None:
        self.engine = engine
        self.layout = engine.info.layout
        self._events: list[ConnectorEvent] = []
        address = StoreAddress(
            index_url=store.index_url,
            data_urls=store.data_urls,
            pool="default",
            node=NodeId(name),
            epoch=Epoch(epoch),
            fingerprint=engine.info.fingerprint,
        )
        # A server that is slow on a busy machine does not count as lost.
        self._connector = StoreConnector(address, engine.stored, patient_index, PATIENT)

    def __enter__(self) -> NodeEnd:
        self._connector.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connector.close()

    def compute(self, request: Request) -> tuple[Reservation, list[int]]:
        """Run a request to its end. Return a reservation of its prompt's pages, and the generated
        ids."""
        self.engine.submit(request)
        ids = self.run()
        reservation = self.reserve(request)
        assert reservation.cached == len(reservation.hashes)
        return reservation, ids

    def run(self) -> list[int]:
        """Step until the engine has no work, and return the generated ids."""
        ids: list[int] = []
        for _ in range(STEP_LIMIT):
            if not self.engine.has_work():
                return ids
            ids += [token.id for token in self.engine.step().tokens]
        raise AssertionError(f"not done after {STEP_LIMIT} steps")

    def reserve(self, request: Request) -> Reservation:
        reservation = self.engine.reserve(request)
        assert reservation is not None, "no blocks are free"
        return reservation

    def pages_of(self, reservation: Reservation, chunk: int) -> tuple[BlockId, ...]:
        """The pages of a chunk as a node stores it: of an early chunk only those of the groups
        of layers without a window."""
        layout = self.layout
        pages = layout.chunk_of(reservation.blocks, chunk)
        chunks = len(reservation.hashes) // layout.chunk_blocks
        if chunk < layout.first_complete(chunks):
            pages = pages[: layout.num_full_groups * layout.chunk_blocks]
        assert all(pages), f"the windows have left chunk {chunk}"
        return pages

    def publish(self, reservation: Reservation, on_copied: Callable[[], None]) -> list[Marker]:
        """Publish all chunks of a prompt, and return their markers in order. `on_copied` is called
        once the source pages are copied, which is before the bytes are known to be stored."""
        refs = self.refs(reservation)
        for ref in refs:
            self._connector.publish(ref, self.pages_of(reservation, ref.index), Priority.HANDOFF)
        self._await(ChunkCopied, len(refs))
        on_copied()
        events = sorted(self._await(ChunkPublished, len(refs)), key=lambda event: event.chunk.index)
        markers = [event.marker for event in events if event.marker is not None]
        assert len(markers) == len(refs), [event.reason for event in events]
        return markers

    def look_up(self, reservation: Reservation) -> list[Marker]:
        refs = self.refs(reservation)
        hashes = [ref.hash for ref in refs]
        self._connector.lookup(reservation.request, 1, hashes)
        [event] = self._await(ChunksLookedUp, 1)
        markers = [marker for marker in event.markers if marker is not None]
        assert len(markers) == len(refs), f"{len(markers)} of {len(refs)} chunks are stored"
        return markers

    def fetch(
        self,
        reservation: Reservation,
        markers: Sequence[Marker],
        chunks: Iterable[int],
        into: Callable[[int], Sequence[BlockId]] | None = None,
    ) -> None:
        """Fetch chunks, given by their places in refs(), into the reservation's own pages, or into
        those that `into` gives for a chunk's index."""
        refs = self.refs(reservation)
        pages_for = into or (lambda chunk: self.pages_of(reservation, chunk))
        places = list(chunks)
        for at in places:
            pages = pages_for(refs[at].index)
            self._connector.fetch(refs[at], markers[at], pages, Priority.HANDOFF)
        failures = [
            event.reason for event in self._await(ChunkFetched, len(places)) if not event.ok
        ]
        assert failures == []

    def refs(self, reservation: Reservation) -> list[ChunkRef]:
        """References to the prompt's full chunks of which anything is stored."""
        size = self.layout.chunk_blocks
        names = reservation.hashes[size - 1 :: size]
        return [
            ChunkRef(reservation.request, 1, index, name)
            for index, name in enumerate(names)
            if self.pages_of(reservation, index)
        ]

    def _await(self, kind: type[E], count: int) -> list[E]:
        """Wait for `count` events of a kind, remove them and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while sum(isinstance(event, kind) for event in self._events) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"{count} {kind.__name__} did not arrive; {self._events}"
            select.select([self._connector.fileno()], [], [], left)
            self._events += self._connector.poll()
        matching: list[E] = [event for event in self._events if isinstance(event, kind)]
        assert len(matching) == count, matching
        self._events = [event for event in self._events if not isinstance(event, kind)]
        return matching


def dump(memory: KVMemory) -> Pages:
    """Copy the whole pool."""
    if isinstance(memory, TorchMemory):
        flat = memory.pool.cpu().contiguous().view(torch.uint8).reshape(len(memory.pool), -1)
        return np.array(flat.numpy())
    assert isinstance(memory, SimMemory)
    return memory._pool.view(np.uint8).reshape(len(memory._pool), -1).copy()


def flood(memory: KVMemory, seed: int) -> None:
    """Fill every page with noise, which shows later which pages were written. The noise is finite
    in every dtype, as everything in a pool must be."""
    noise = np.random.default_rng(seed).integers(0, 0x7F, dump(memory).shape, np.uint8)
    if isinstance(memory, TorchMemory):
        raw = memory.pool.view(torch.uint8)
        raw.copy_(torch.from_numpy(noise).view_as(raw))
        return
    assert isinstance(memory, SimMemory)
    memory._pool.view(np.uint8).reshape(len(noise), -1)[:] = noise
