"""The data plane as a node's step loop drives it: what it is asked, and what comes back.

In: chunks of the engine's paged cache to look up, fetch and publish. Out: events, each once; how
the data servers and the index are. Implemented by redis_connector (over a store) and
null_connector.
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

PADDING = BlockId(0)


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk of one request: its index in the prompt and its name."""

    request: RequestId
    attempt: int
    index: int
    hash: BlockHash


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Answer to lookup(), one per hash asked. All None where the index is out of reach."""

    request: RequestId
    attempt: int
    markers: tuple[Marker | None, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch settled: the bytes are in the blocks and verified, or `ok` is False."""

    chunk: ChunkRef
    ok: bool
    bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Copied:
    """A publish no longer needs its source blocks (they are in staging, or sent)."""

    chunk: ChunkRef
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """A publish settled: stored and marked, or `marker` is None and `reason` says why."""

    chunk: ChunkRef
    marker: Marker | None
    bytes: int = 0
    reason: str = ""


# An InboxEntry is one for a request of this node: what its prefill partner says of its chunks.
ConnectorEvent = LookedUp | Fetched | Copied | Published | InboxEntry


class KVConnector(Protocol):
    """Moves chunks between KVMemory and the store, talks to the index, and knows how both are;
    never blocks the caller. Results come back through poll(); `fileno` becomes readable when there
    are any."""

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None: ...

    def fetch(
        self, chunk: ChunkRef, marker: Marker, blocks: Sequence[BlockId], priority: Priority
    ) -> None: ...

    def publish(
        self,
        chunk: ChunkRef,
        blocks: Sequence[BlockId],
        priority: Priority,
        inbox: tuple[str, str] | None = None,
    ) -> None:
        """Store a chunk; once it is marked, `inbox` hears of it, and then comes Published."""

    def announce(self, inbox: tuple[str, str], entry: InboxEntry) -> None:
        """Append to the inbox of (node, epoch), after everything announced to it before."""

    def poll(self) -> list[ConnectorEvent]: ...

    def fileno(self) -> int: ...

    def rates(self) -> tuple[float, float]:
        """Put and get, bytes per second, all instances together; 0.0 is not measured."""
        ...

    def instances(self) -> tuple[DataInstance, ...]:
        """The data servers as they are now: rates, latency, fill. Cheap."""
        ...

    def take_behind(self, size: int) -> bool:
        """Whether `size` bytes may be written behind now; True counts them as written. False while
        their bandwidth is used up, or the store is over half full, or in trouble."""
        ...

    def drain(self, draining: bool) -> None:
        """While this node drains the limit of take_behind() is lifted."""
        ...

    def healthy(self) -> bool:
        """Whether a chunk could be published now: the index and a data instance take what they are
        given. Cheap, and asked at every turn of the loop."""
        ...

    def store_health(self) -> StoreHealth:
        """What routers are told of the store: healthy() in their words, or that there is none."""
        ...

    def close(self) -> None: ...
