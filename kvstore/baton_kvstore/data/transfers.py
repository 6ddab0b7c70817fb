"""One put or get of a chunk on its way through a transfer thread, one head shard after the other.

    stage     a put copies a shard into the staging buffer and seals it; after the last one the
              source is free
    exchange  the round trip; may be repeated on a new connection
    deliver   a get hands a verified shard to the sink
    settle    the result goes to the caller, exactly once, whatever happened before: all shards were
              moved, or one was not and the rest were not tried

A direct operation copies nothing: the payload is sent from, or received into, the caller's own
memory, and of the staging buffer only the header's part is used, and that of pieces not given. A
put's source is free when it has settled; what a get has written is of use when it was verified.

In: a request from the data plane and a connection. Out: `PutResult` or `GetResult`. The callbacks
are the caller's and run in the transfer thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

from baton_kvstore.connection.resp import RespConnection, leading
from baton_kvstore.data.chunk_format import (
    HEADER_BYTES,
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
# A chunk's payload where it lies, in order; None is a block of it that is not to be touched.
Pieces = Sequence[memoryview | None]


@dataclass(frozen=True, slots=True)
class PutResult:
    """A put settled: stored (then `marker` is what to write on the index), or `reason` says why
    not. `bytes` is the payload's size if stored, `seconds` the time of the transfer."""

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
    """A get settled. `gone` says that the marker is wrong and should be dropped (missing or
    corrupt), False that the store could not be asked (down, slow)."""

    hash: BlockHash
    ok: bool
    bytes: int = 0
    reason: str = ""
    gone: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Format:
    """What all values of one data plane share."""

    layout: KVLayout
    fingerprint: Fingerprint
    epoch: Epoch
    ttl_base_s: float

    @cached_property
    def value_bytes(self) -> int:
        return HEADER_BYTES + self.layout.shard_bytes

    @cached_property
    def digest(self) -> bytes:
        return fingerprint_digest(self.fingerprint)

    @cached_property
    def writer(self) -> bytes:
        return epoch_digest(self.epoch)


def refusal(error: ServerRefused) -> str:
    """Why a server did not do it, in the store's words."""
    return STORE_FULL if error.code == "OOM" else f"refused: {error}"


def in_pieces(direct: Pieces | None, buffer: memoryview) -> list[memoryview]:
    """A value: its header in the buffer, and its payload there too but for what lies elsewhere."""
    if direct is None:
        return [buffer]
    value, at = [buffer[:HEADER_BYTES]], HEADER_BYTES
    share = (len(buffer) - HEADER_BYTES) // len(direct)
    for piece in direct:
        value.append(buffer[at : at + share] if piece is None else piece)
        at += share
    return value


class Operation(Protocol):
    """What a transfer thread drives: stage, exchange and deliver for each shard."""

    is_put: ClassVar[bool]
    priority: Priority
    queued_at: float

    def stage(self, buffer: memoryview, shard: int) -> None: ...

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        """Return "" or why it failed for good; raise StoreUnavailable if the link is to blame."""
        ...

    def deliver(self, buffer: memoryview, shard: int) -> None: ...

    def settle(self, reason: str, seconds: float) -> None: ...


@dataclass(slots=True)
class Put:
    """Store one chunk. `copied` is called exactly once, before `done`, also where the put failed
    or never ran: after it the source is not read any more."""

    format: Format
    hash: BlockHash
    tokens: int
    depth: int
    fill: Callable[[memoryview, int], None]
    copied: Callable[[], None]
    done: Callable[[PutResult], None]
    priority: Priority
    direct: Sequence[memoryview] | None = None
    is_put: ClassVar[bool] = True
    queued_at: float = 0.0
    _copied: bool = False
    _instance: int = 0
    _runs: set[str] = field(default_factory=set)  # of the server, that shards were put to

    def stage(self, buffer: memoryview, shard: int) -> None:
        layout = self.format.layout
        if self.direct is None:
            self.fill(buffer[HEADER_BYTES:], shard)
        spec = chunk_spec(layout, self.format.digest, self.hash, self.tokens, shard)
        seal_value(in_pieces(self.direct, buffer), spec, self.format.writer)
        if self.direct is None and shard == layout.kv_shards - 1:
            self._release()

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        value = in_pieces(self.direct, buffer)
        lifetime = ttl_ms(self.depth, self.format.ttl_base_s)
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
            payload_bytes=layout.chunk_bytes,
            shards=layout.kv_shards,
            depth=self.depth,
            stamp=int.from_bytes(os.urandom(STAMP_BYTES)),
        )

    def _release(self) -> None:
        if not self._copied:
            self._copied = True
            self.copied()


@dataclass(slots=True)
class Get:
    """Fetch one chunk to where its marker says it is."""

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

    def stage(self, buffer: memoryview, shard: int) -> None:
        pass

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview, shard: int
    ) -> str:
        if self.marker.run_id != link.run_id:
            # Is it our connection that is old? A dead one breaks here and is opened anew.
            with contextlib.suppress(ServerRefused):  # who may not PING gets an answer too
                link.command(deadline, b"PING")
            return self.lost(f"{MISSING}: instance {instance} restarted since")
        lifetime = ttl_ms(self.depth, self.format.ttl_base_s)
        key = chunk_key(self.format.fingerprint, self.hash, shard)
        value = in_pieces(self.direct, buffer)
        try:
            length = link.get(deadline, key, value, lifetime)
        except ValueTooLong as error:
            return self.lost(str(error))
        except ServerRefused as error:
            return refusal(error)
        if length is None:
            return self.lost(MISSING)
        spec = chunk_spec(self.format.layout, self.format.digest, self.hash, shard=shard)
        wrong = verify_value(leading(value, length), spec)
        return self.lost(wrong) if wrong else ""

    def lost(self, reason: str) -> str:
        """Note that the marker is wrong."""
        self._gone = True
        return reason

    def deliver(self, buffer: memoryview, shard: int) -> None:
        if self.direct is None:
            self.sink(buffer[HEADER_BYTES:], shard)

    def settle(self, reason: str, seconds: float) -> None:
        size = 0 if reason else self.format.layout.chunk_bytes
        self.done(GetResult(self.hash, not reason, size, reason, self._gone, seconds))
