"""The index role as one node's control loop sees it: commit markers and hand-off inboxes.

A marker says that all of a chunk is stored, and where; it is written after the value and before
the inbox entry. An inbox is a stream per decode node and epoch with one reader, which reads from
its start: what it has confirmed by asking for more is removed.

In: names and records of baton_protocol. Out: the same, or StoreUnavailable. Small commands of
redis-py's asyncio client, but for lookups: see `connection.resp`. Use one Index per event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

from baton_kvstore.connection.client import (
    CONNECT_TIMEOUT_S,
    OPERATION_TIMEOUT_S,
    AsyncClient,
    ClosesItself,
)
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp import AsyncResp, Reply
from baton_kvstore.connection.server_settings import CareMode, care
from baton_kvstore.errors import ProtocolBroken, ServerRefused
from baton_kvstore.keys import inbox_key, marker_key, marker_request, probe_key
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId
from baton_protocol.store import InboxEntry, Marker
from baton_protocol.wire import Codec, WireError

logger = logging.getLogger(__name__)
T = TypeVar("T")

INBOX_MAX_ENTRIES = 10_000
INBOX_TTL_S = 120
INBOX_BATCH = 256
PROBE_TTL_MS = 5000
FIELD = b"e"
_DELETE_IF_EQUAL = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class Index(ClosesItself):
    """Markers and inboxes of one pool. Safe for concurrent calls in its event loop. Each call
    settles within `timeout_s` (and what it blocks by intent), however many there are at once. An
    inbox that nobody reads is trimmed to about `inbox_entries`."""

    def __init__(
        self,
        url: str,
        pool: str,
        *,
        timeout_s: float = OPERATION_TIMEOUT_S,
        inbox_entries: int = INBOX_MAX_ENTRIES,
    ) -> None:
        endpoint = parse_endpoint(url)
        self._pool = pool
        self._inbox_entries = inbox_entries
        self._client = AsyncClient(endpoint, timeout_s=timeout_s)
        # Blocking reads keep a connection of their own: they must not use up the others.
        self._reader = AsyncClient(endpoint, timeout_s=timeout_s, max_connections=2)
        self._lookups = AsyncResp(
            endpoint, timeout_s=timeout_s, connect_timeout_s=CONNECT_TIMEOUT_S
        )
        self._markers: Codec[Marker] = Codec(Marker)
        self._entries: Codec[InboxEntry] = Codec(InboxEntry)
        self._delete_if_equal = self._client.redis.register_script(_DELETE_IF_EQUAL)

    async def close(self) -> None:
        self._lookups.close()
        await self._reader.close()
        await self._client.close()

    async def ping(self) -> None:
        """Raise StoreUnavailable if the index does not answer."""
        await self._client.call(self._client.redis.execute_command("PING"))

    async def probe(self, node: NodeId, epoch: Epoch) -> None:
        """A small write, as a marker is one. Raise StoreUnavailable also if the index is full."""
        key = probe_key(self._pool, node, epoch)
        await self._client.call(self._client.redis.set(key, b"", px=PROBE_TTL_MS))

    async def run_id(self) -> str:
        """Another one after a restart: what the index held is gone."""
        info: dict[str, str] = await self._client.call(self._client.redis.info("server"))
        return info["run_id"]

    async def tend(self, mode: CareMode) -> None:
        """See to the server's settings (see `server_settings`): to be called once per run id."""
        talk = care("index", mode, self._client.label)
        answer: Reply | ServerRefused = None
        try:
            command = next(talk)
            while True:
                try:
                    answer = await self._lookups.command(*command)
                except ServerRefused as error:
                    answer = error
                command = talk.send(answer)
        except StopIteration:
            return

    # --- markers ---------------------------------------------------------------------------

    async def lookup(
        self, fingerprint: Fingerprint, chunks: Sequence[BlockHash]
    ) -> list[Marker | None]:
        """One MGET; None where there is no marker (or none that can be read)."""
        if not chunks:
            return []
        values = await self._lookups.request(marker_request(fingerprint, chunks))
        if not isinstance(values, list) or len(values) != len(chunks):
            raise ProtocolBroken(f"{self._client.label} did not answer {len(chunks)} names")
        decode = self._markers.decode
        try:
            return [None if value is None else decode(value) for value in values]
        except WireError:
            return [self._read(self._markers, value) for value in values]

    async def mark_all(
        self, fingerprint: Fingerprint, marks: Iterable[tuple[BlockHash, Marker, int]]
    ) -> None:
        """Commit chunks whose shards are all acknowledged: (chunk, marker, ttl_ms) each, in one
        round trip. Where it raises, some may be committed, which is as true of them."""
        pipeline = self._client.redis.pipeline(transaction=False)
        for chunk, marker, ttl_ms in marks:
            pipeline.set(marker_key(fingerprint, chunk), self._markers.encode(marker), px=ttl_ms)
        if len(pipeline):
            await self._client.call(pipeline.execute())

    async def refresh(
        self, fingerprint: Fingerprint, lifetimes: Iterable[tuple[BlockHash, int]]
    ) -> None:
        """Prolong markers whose chunks were fetched, as GETEX prolonged their values, in one round
        trip: (chunk, ttl_ms) each."""
        pipeline = self._client.redis.pipeline(transaction=False)
        for chunk, ttl_ms in lifetimes:
            pipeline.pexpire(marker_key(fingerprint, chunk), ttl_ms)
        if len(pipeline):
            await self._client.call(pipeline.execute())

    async def unmark(self, fingerprint: Fingerprint, chunk: BlockHash, marker: Marker) -> bool:
        """Drop a marker found wrong, unless somebody has written another since. They are compared
        as this version writes them: one of a version with more fields stays until it expires."""
        key, value = marker_key(fingerprint, chunk), self._markers.encode(marker)
        removed: int = await self._client.call(self._delete_if_equal(keys=[key], args=[value]))
        return bool(removed)

    # --- inboxes ---------------------------------------------------------------------------

    async def announce(self, node: NodeId, epoch: Epoch, entries: Sequence[InboxEntry]) -> None:
        """Append to a decode node's inbox, in order, in one round trip. An inbox nobody reads is
        bounded by `inbox_entries` and dies after INBOX_TTL_S."""
        if not entries:
            return
        key = inbox_key(self._pool, node, epoch)
        # All or nothing: a stream whose EXPIRE was lost with the connection would stay for good.
        pipeline = self._client.redis.pipeline(transaction=True)
        for entry in entries:
            pipeline.xadd(
                key,
                {FIELD: self._entries.encode(entry)},
                maxlen=self._inbox_entries,
                approximate=True,
            )
        pipeline.expire(key, INBOX_TTL_S)
        await self._client.call(pipeline.execute())

    async def read_inbox(
        self, node: NodeId, epoch: Epoch, confirmed: Sequence[bytes] = (), block_ms: int = 1000
    ) -> tuple[list[bytes], list[InboxEntry]]:
        """The first entries (at most 256) and the ids to confirm them by with the next call; waits
        up to `block_ms` for the first. What is `confirmed` is removed.

        It reads from the start, never "after the last id": ids are times of the server's clock. If
        that is set back, a stream that expired begins again with lower ids than the last one.
        """
        key = inbox_key(self._pool, node, epoch)
        if confirmed:
            pipeline = self._client.redis.pipeline(transaction=False)
            pipeline.xdel(key, *confirmed)
            pipeline.expire(key, INBOX_TTL_S)
            await self._client.call(pipeline.execute())
        reply = await self._reader.call(
            self._reader.redis.xread({key: "0-0"}, count=INBOX_BATCH, block=max(1, block_ms)),
            extra_s=block_ms / 1000.0,
        )
        ids: list[bytes] = []
        entries: list[InboxEntry] = []
        for _, items in reply or ():
            for item_id, fields in items:
                ids.append(item_id)
                entry = self._read(self._entries, fields.get(FIELD))
                if entry is not None:
                    entries.append(entry)
        return ids, entries

    async def drop_inbox(self, node: NodeId, epoch: Epoch) -> None:
        """Remove this node's own inbox at its end."""
        await self._client.call(self._client.redis.delete(inbox_key(self._pool, node, epoch)))

    def _read(self, codec: Codec[T], value: bytes | None) -> T | None:
        if value is None:
            return None
        try:
            return codec.decode(value)
        except WireError as error:
            logger.warning("index %s: %s", self._client.label, error)
            return None
