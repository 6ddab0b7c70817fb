"""One put or get of a chunk in a transfer thread.

A transfer thread runs these phases for one head shard after the other:

    stage     a put copies the shard into the staging buffer and writes its header; after the last
              shard the source is free
    exchange  the round trip; may be repeated on a new connection
    deliver   a get passes the verified shard to the sink

    settle    once per operation, whatever happened before: gives the caller the `PutResult` or
              `GetResult`. All shards were moved, or one failed and the rest were not tried.

The callbacks are the caller's and run in the transfer thread.

A direct operation copies nothing: the payload is sent from, or received into, the caller's memory.
The staging buffer then holds only the header, and the blocks for which the caller gave no memory.
The source of a direct put is free when the put has settled. Bytes that a direct get wrote are valid
only if the result is ok.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

from baton_kvstore.connection.memory_pieces import leading
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.data.chunk_format import (
    HEADER_BYTES,
    ChunkSpec,
    chunk_spec,
    epoch_digest,
    fingerprint_digest,
)
from baton_kvstore.data.chunk_format import seal as seal_value
from baton_kvstore.data.chunk_format import verify as verify_value
from baton_kvstore.errors import ServerRefused, ValueTooLong
from baton_kvstore.keys import chunk_key, ttl_ms
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.store import Marker, Priority

STORE_FULL = "store full"
STAMP_BYTES = 4
MISSING = "missing"
# The memory of a chunk's payload, in order. None marks a block that a get must not write.
Pieces = Sequence[memoryview | None]


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of a put. If the chunk is stored, `marker` is to be written on the index; else
    `reason` says why not. `bytes` is the payload's size if stored, `seconds` the transfer time."""

    hash: BlockHash
    marker: Marker | None
    bytes: int = 0
    reason: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.marker is not None


@dataclass(frozen=True, slots=True)
class GetResult:
    """The result of a get. If it failed, `reason` says why. `gone` True means that the chunk is
    missing or corrupt, so its marker should be dropped; False that the server was down or slow.
    `bytes` is the payload's size if ok, `seconds` the transfer time."""

    hash: BlockHash
    ok: bool
    bytes: int = 0
    reason: str = ""
    gone: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Format:
    """What all values of one data plane have in common."""

    layout: KVLayout
    fingerprint: Fingerprint
    epoch: Epoch
    ttl_base_s: float

    @cached_property
    def payload_sizes(self) -> frozenset[int]:
        """The bytes that a chunk may have: with the blocks of all groups, or only with those of the
        groups without a window."""
        sizes = frozenset({self.layout.chunk_bytes, self.layout.full_groups_bytes})
        return sizes - {0}

    def value_bytes(self, payload_bytes: int) -> int:
        """Bytes of one value of a chunk with `payload_bytes`: the header and one head shard."""
        return HEADER_BYTES + payload_bytes // self.layout.kv_shards

    def spec(
        self, chunk: BlockHash, payload_bytes: int, shard: int, tokens: int | None = None
    ) -> ChunkSpec:
        """Return the spec of one shard of a chunk with `payload_bytes`."""
        size = payload_bytes // self.layout.kv_shards
        return chunk_spec(self.layout, self.digest, chunk, tokens, shard, size)

    @cached_property
    def digest(self) -> bytes:
        return fingerprint_digest(self.fingerprint)

    @cached_property
    def writer(self) -> bytes:
        return epoch_digest(self.epoch)


def refusal(error: ServerRefused) -> str:
    """Return the reason of a put or get that the server refused."""
    return STORE_FULL if error.code == "OOM" else f"refused: {error}"


def in_pieces(direct: Pieces | None, buffer: memoryview) -> list[memoryview]:
    """Return the pieces of a value. The header is in `buffer`. The payload is in `direct`, and in
    `buffer` for blocks that are None there or if `direct` is None."""
    if direct is None:
        return [buffer]
    value, at = [buffer[:HEADER_BYTES]], HEADER_BYTES
    share = (len(buffer) - HEADER_BYTES) // len(direct)
    for piece in direct:
        value.append(buffer[at : at + share] if piece is None else piece)
        at += share
    return value


class Operation(Protocol):
    """A put or get, run by a transfer thread: stage, exchange and deliver for each shard, then
    settle. `buffer` has `value_bytes` bytes."""

    is_put: ClassVar[bool]
    priority: Priority
    queued_at: float

    @property
    def value_bytes(self) -> int:
        """Bytes of each value: the header and one head shard."""
        ...

    def stage(self, buffer: memoryview, shard: int) -> None: ...

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        """Return "", or why it failed for good. Raise StoreUnavailable if the connection failed."""
        ...

    def deliver(self, buffer: memoryview, shard: int) -> None: ...

    def settle(self, reason: str, seconds: float) -> None: ...


@dataclass(slots=True)
class Put:
    """Store one chunk of `payload_bytes`; None means all groups. `kept_until` is as in Marker.
    `copied` is called exactly once, before `done`, also if the put failed or never ran: after it
    the source is no longer read."""

    format: Format
    hash: BlockHash
    tokens: int
    depth: int
    fill: Callable[[memoryview, int], None]
    copied: Callable[[], None]
    done: Callable[[PutResult], None]
    priority: Priority
    direct: Sequence[memoryview] | None = None
    payload_bytes: int | None = None
    kept_until: int = 0
    is_put: ClassVar[bool] = True
    queued_at: float = 0.0
    _copied: bool = False
    _instance: int = 0
    _runs: set[str] = field(default_factory=set)  # run ids of the server while shards were put

    @property
    def value_bytes(self) -> int:
        return self.format.value_bytes(self._size)

    @property
    def _size(self) -> int:
        return self.payload_bytes or self.format.layout.chunk_bytes

    def stage(self, buffer: memoryview, shard: int) -> None:
        layout = self.format.layout
        if self.direct is None:
            self.fill(buffer[HEADER_BYTES:], shard)
        spec = self.format.spec(self.hash, self._size, shard, self.tokens)
        seal_value(in_pieces(self.direct, buffer), spec, self.format.writer)
        if self.direct is None and shard == layout.kv_shards - 1:
            self._release()

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        value = in_pieces(self.direct, buffer)
        lifetime = ttl_ms(self.depth, self.format.ttl_base_s, self.kept_until)
        key = chunk_key(self.format.fingerprint, self.hash, shard)
        try:
            link.put(deadline, key, value, lifetime)
        except ServerRefused as error:
            return refusal(error)
        self._instance = instance
        self._runs.add(link.run_id)
        if len(self._runs) > 1:
            return f"instance {instance} was restarted between two shards"
        return ""

    def deliver(self, buffer: memoryview, shard: int) -> None:
        pass

    def settle(self, reason: str, seconds: float) -> None:
        self._release()
        marker = None if reason else self._marker()
        size = marker.payload_bytes if marker is not None else 0
        self.done(PutResult(self.hash, marker, size, reason, seconds))

    def _marker(self) -> Marker:
        layout = self.format.layout
        (run_id,) = self._runs
        return Marker(
            instance=self._instance,
            run_id=run_id,
            payload_bytes=self._size,
            shards=layout.kv_shards,
            depth=self.depth,
            stamp=int.from_bytes(os.urandom(STAMP_BYTES)),
            kept_until=self.kept_until,
        )

    def _release(self) -> None:
        if not self._copied:
            self._copied = True
            self.copied()


@dataclass(slots=True)
class Get:
    """Fetch one chunk from the server that its marker names."""

    format: Format
    hash: BlockHash
    marker: Marker
    depth: int
    sink: Callable[[memoryview, int], None]
    done: Callable[[GetResult], None]
    priority: Priority
    direct: Pieces | None = None
    is_put: ClassVar[bool] = False
    queued_at: float = 0.0
    _gone: bool = False

    @property
    def value_bytes(self) -> int:
        return self.format.value_bytes(self.marker.payload_bytes)

    def stage(self, buffer: memoryview, shard: int) -> None:
        pass

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        if self.marker.run_id != link.run_id:
            # This connection may be older than the server's restart. A dead one raises here, and
            # the get is repeated on a new one. A refusal of PING is an answer, too.
            with contextlib.suppress(ServerRefused):
                link.command(deadline, b"PING")
            return self.lose_marker(f"{MISSING}: instance {instance} restarted since")
        lifetime = ttl_ms(self.depth, self.format.ttl_base_s, self.marker.kept_until)
        key = chunk_key(self.format.fingerprint, self.hash, shard)
        value = in_pieces(self.direct, buffer)
        try:
            length = link.get(deadline, key, value, lifetime)
        except ValueTooLong as error:
            return self.lose_marker(str(error))
        except ServerRefused as error:
            return refusal(error)
        if length is None:
            return self.lose_marker(MISSING)
        spec = self.format.spec(self.hash, self.marker.payload_bytes, shard)
        wrong = verify_value(leading(value, length), spec)
        return self.lose_marker(wrong) if wrong else ""

    def lose_marker(self, reason: str) -> str:
        """Record that the marker is wrong, and return `reason`."""
        self._gone = True
        return reason

    def deliver(self, buffer: memoryview, shard: int) -> None:
        if self.direct is None:
            self.sink(buffer[HEADER_BYTES:], shard)

    def settle(self, reason: str, seconds: float) -> None:
        size = 0 if reason else self.marker.payload_bytes
        self.done(GetResult(self.hash, not reason, size, reason, self._gone, seconds))
