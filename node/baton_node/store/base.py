"""The KV connector's Protocol: the calls that the step loop makes, and the events that come back.

In: chunks of the engine's paged cache to look up, fetch and publish. Out: events, each exactly
once; the health of the data servers and of the index. `redis_connector` implements it over a store,
`null_connector` for a node without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.store import (
    DataInstance,
    InboxEntry,
    Marker,
    Priority,
    StoreHealth,
)


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk of one request. `index` is its place in the chain of chunks, `hash` its name. One
    of a pinned prefix is `kept_until` then, in Unix seconds."""

    request: RequestId
    attempt: int
    index: int
    hash: BlockHash
    kept_until: int = 0


@dataclass(frozen=True, slots=True)
class ChunksLookedUp:
    """The answer to lookup(): one marker per hash, or None if the store does not have the chunk.
    All are None if the index is unreachable."""

    request: RequestId
    attempt: int
    markers: tuple[Marker | None, ...]


@dataclass(frozen=True, slots=True)
class ChunkFetched:
    """A fetch has settled. If `ok`, the blocks hold the verified bytes; else `reason` says why
    not."""

    chunk: ChunkRef
    ok: bool
    bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ChunkCopied:
    """A publish does not need its source blocks any more: they were copied, sent, or refused."""

    chunk: ChunkRef
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class ChunkPublished:
    """A publish has settled: the chunk and its marker are stored, or `marker` is None and `reason`
    says why not."""

    chunk: ChunkRef
    marker: Marker | None
    bytes: int = 0
    reason: str = ""


# An InboxEntry comes from a prefill node and is about a request on this node.
ConnectorEvent = ChunksLookedUp | ChunkFetched | ChunkCopied | ChunkPublished | InboxEntry


class KVConnector(Protocol):
    """Moves chunks between KVMemory and the store, and reads and writes the index.

    No call but close() blocks. Results come back through poll(); the file descriptor of fileno()
    becomes readable when there are any.
    """

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None: ...

    def fetch(
        self, chunk: ChunkRef, marker: Marker, blocks: Sequence[BlockId], priority: Priority
    ) -> None:
        """Fetch a chunk into its blocks, which are in the order of KVLayout.chunk_of. Padding
        blocks are not written, and neither are those that the marker's value does not have."""

    def publish(
        self,
        chunk: ChunkRef,
        blocks: Sequence[BlockId],
        priority: Priority,
        inbox: tuple[str, str] | None = None,
    ) -> None:
        """Store a chunk and its marker, announce it to `inbox` (node, epoch) if given, and then
        emit ChunkPublished. ChunkCopied comes before ChunkPublished. `blocks` are in the order of
        KVLayout.chunk_of: all of them, or only those of the groups without a window."""

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        """Append an entry to the inbox of (node, epoch), after all earlier announcements to it.
        Announcements can be lost; the decode node then computes the chunks."""

    def poll(self) -> list[ConnectorEvent]: ...

    def fileno(self) -> int: ...

    def rates(self) -> tuple[float, float]:
        """Return the measured put and get rates in bytes per second, of all data servers together;
        0.0 means not measured."""
        ...

    def instances(self) -> tuple[DataInstance, ...]:
        """Return the latest figures of each data server: rates, latency, memory. Does no I/O."""
        ...

    def take_behind(self, size: int) -> bool:
        """Return whether write-behind may put `size` bytes now; True counts them as written. False
        if its bandwidth is used up, if other puts are queued, or if the store is over half full or
        in trouble."""
        ...

    def set_draining(self, draining: bool) -> None:
        """Lift the limits of take_behind() while `draining`. Only a store in trouble still makes it
        return False."""
        ...

    def healthy(self) -> bool:
        """Return whether chunks can be published now: the index and at least one data server accept
        writes. Does no I/O: the loop calls it in each iteration."""
        ...

    def store_health(self) -> StoreHealth:
        """Return the store's health for load reports: "up" or "down" as healthy(), or "none"
        without a store."""
        ...

    def close(self) -> None: ...
