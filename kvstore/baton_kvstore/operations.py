"""One put or get on its way through a transfer thread.

    stage     a put copies its payload into the staging buffer and seals it; then the source is free
    exchange  the round trip; may be repeated on a new connection
    deliver   a get hands its verified payload to the sink
    settle    the result goes to the caller, exactly once, whatever happened before

In: a request from the data plane and a connection. Out: `PutResult` or `GetResult`. The callbacks
are the caller's and run in the transfer thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton_kvstore.chunk import HEADER_BYTES, chunk_spec, epoch_digest, fingerprint_digest
from baton_kvstore.chunk import seal as seal_value
from baton_kvstore.chunk import verify as verify_value
from baton_kvstore.errors import ServerRefused, ValueTooLong
from baton_kvstore.keys import chunk_key, ttl_ms
from baton_kvstore.resp import RespConnection
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.store import Marker

STORE_FULL = "store full"
MISSING = "missing"


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


@dataclass(frozen=True, slots=True)
class Format:
    """What all values of one data plane share."""

    layout: KVLayout
    fingerprint: Fingerprint
    epoch: Epoch
    ttl_base_s: float

    @property
    def value_bytes(self) -> int:
        return HEADER_BYTES + self.layout.chunk_bytes


def refusal(error: ServerRefused) -> str:
    """Why a server did not do it, in the store's words."""
    return STORE_FULL if error.code == "OOM" else f"refused: {error}"


class Operation(Protocol):
    """What a transfer thread drives. `urgent` ones go first."""

    urgent: bool
    queued_at: float

    def stage(self, value: memoryview) -> None: ...

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview
    ) -> str:
        """Return "" or why it failed for good; raise StoreUnavailable if the link is to blame."""
        ...

    def deliver(self, value: memoryview) -> None: ...

    def settle(self, reason: str, seconds: float) -> None: ...


@dataclass(slots=True)
class Put:
    """Store one chunk. `copied` is called exactly once, before `done`, also where the put failed
    or never ran: after it the source is not read any more."""

    format: Format
    hash: BlockHash
    tokens: int
    depth: int
    fill: Callable[[memoryview], None]
    copied: Callable[[], None]
    done: Callable[[PutResult], None]
    urgent: bool = False
    queued_at: float = 0.0
    _copied: bool = False
    _marker: Marker | None = None

    def stage(self, value: memoryview) -> None:
        layout = self.format.layout
        self.fill(value[HEADER_BYTES:])
        digest = fingerprint_digest(self.format.fingerprint)
        spec = chunk_spec(layout, digest, self.hash, self.tokens)
        seal_value(value, spec, epoch_digest(self.format.epoch))
        self._release()

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview
    ) -> str:
        value = buffer[: self.format.value_bytes]
        lifetime = ttl_ms(self.depth, self.format.ttl_base_s)
        try:
            link.put(deadline, chunk_key(self.format.fingerprint, self.hash), value, lifetime)
        except ServerRefused as error:
            return refusal(error)
        layout = self.format.layout
        self._marker = Marker(
            instance=instance,
            run_id=link.run_id,
            payload_bytes=layout.chunk_bytes,
            shards=layout.kv_shards,
            depth=self.depth,
        )
        return ""

    def deliver(self, value: memoryview) -> None:
        pass

    def settle(self, reason: str, seconds: float) -> None:
        self._release()
        marker = None if reason else self._marker
        size = marker.payload_bytes if marker is not None else 0
        self.done(PutResult(self.hash, marker, size, reason, seconds))

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
    sink: Callable[[memoryview], None]
    done: Callable[[GetResult], None]
    urgent: bool = True
    queued_at: float = 0.0
    _gone: bool = False

    def stage(self, value: memoryview) -> None:
        pass

    def exchange(
        self, link: RespConnection, deadline: float, instance: int, buffer: memoryview
    ) -> str:
        if self.marker.run_id != link.run_id:
            # Is it our connection that is old? A dead one breaks here and is opened anew.
            link.command(deadline, b"PING")
            return self.lost(f"{MISSING}: instance {instance} restarted since")
        layout = self.format.layout
        lifetime = ttl_ms(self.depth, self.format.ttl_base_s)
        try:
            key = chunk_key(self.format.fingerprint, self.hash)
            length = link.get(deadline, key, buffer, lifetime)
        except ValueTooLong as error:
            return self.lost(str(error))
        except ServerRefused as error:
            return refusal(error)
        if length is None:
            return self.lost(MISSING)
        digest = fingerprint_digest(self.format.fingerprint)
        wrong = verify_value(buffer[:length], chunk_spec(layout, digest, self.hash))
        return self.lost(wrong) if wrong else ""

    def lost(self, reason: str) -> str:
        """Note that the marker is wrong."""
        self._gone = True
        return reason

    def deliver(self, value: memoryview) -> None:
        self.sink(value[HEADER_BYTES:])

    def settle(self, reason: str, seconds: float) -> None:
        size = 0 if reason else self.format.layout.chunk_bytes
        self.done(GetResult(self.hash, not reason, size, reason, self._gone, seconds))
