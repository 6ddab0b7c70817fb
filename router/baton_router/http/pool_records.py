"""The records of GET /pool: what a router says of its pool.

`pool_status` makes them, `openapi` describes them, and the table of `baton up` reads them.
"""

from __future__ import annotations

import msgspec

from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance, Exact, NodeLoad, Speeds


class PoolLayout(KVLayout, frozen=True, kw_only=True):
    """A node's layout, and what follows from it: `waste` is the share of memory that the store's
    allocator adds to a chunk."""

    bytes_of_chunk: int = msgspec.field(name="chunk_bytes")
    tokens_of_chunk: int = msgspec.field(name="chunk_tokens")
    bytes_of_block: int = msgspec.field(name="block_bytes")
    wasted: float = msgspec.field(name="waste")


class PoolLoad(NodeLoad, frozen=True, omit_defaults=False):
    """A node's load, with zeros."""


class PoolInstance(DataInstance, frozen=True, omit_defaults=False):
    """One data server as a node sees it, with zeros."""


class PoolCache(msgspec.Struct):
    """A node's prefix cache: chunks that the router knows of, and the node's blocks."""

    chunks: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    host_blocks: int
    host_total_blocks: int


class BookedLoad(msgspec.Struct):
    """What this router has booked on a node."""

    requests: int
    tokens: int
    sequences: int


class OthersLoad(msgspec.Struct):
    """What a node reports beyond this router's bookings: the load of other routers."""

    tokens: int
    sequences: int


class PoolNode(msgspec.Struct, kw_only=True):
    """A node. `differs` names what makes it another kind than the nodes that served longest."""

    id: str
    role: str
    address: str
    pid: int
    epoch: str
    state: str
    reason: str
    replaced_by: str
    store: str
    in_use: bool
    differs: list[str]
    revision: str
    model: str
    engine: str
    exact: Exact
    weights: str
    fingerprint: str
    max_model_len: int
    layout: PoolLayout
    speeds: Speeds
    load: PoolLoad
    instances: list[PoolInstance]
    cache: PoolCache
    booked: BookedLoad
    others: OthersLoad


class UnreachableNode(msgspec.Struct):
    address: str
    reason: str


class NameConflict(msgspec.Struct):
    """The node at `address` is not used: the one at `held_by` has its name and is newer."""

    node: str
    address: str
    held_by: str


class StoreInstance(msgspec.Struct):
    """A data server: usage from the node with the latest report, troubles of each node."""

    used_bytes: int
    limit_bytes: int
    evicted_keys: int
    trouble: dict[str, str]
    put_trouble: dict[str, str]


class PoolStore(msgspec.Struct):
    """The store. `reachable` is None before the index was asked. `chunk_waste` is the allocator's
    overhead per chunk, as a share of the chunk's payload."""

    configured: bool
    reachable: bool | None
    chunk_waste: float | None
    instances: list[StoreInstance]


class Pool(msgspec.Struct, kw_only=True):
    """The pool as this router sees it. `totals` sums the nodes' loads and counts this router's
    requests."""

    pool: str
    router: str
    model: str | None
    fingerprint: str | None
    nodes: list[PoolNode]
    unreachable: list[UnreachableNode]
    conflicts: list[NameConflict]
    store: PoolStore
    totals: dict[str, float]
