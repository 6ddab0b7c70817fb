"""Commit markers and hand-off inboxes on the index, for a node's control loop.

A marker says that a chunk is completely stored, and where. It is written after the values and
before the inbox entry. An inbox is a stream for one decode node and epoch, with one reader. The
reader always reads from the start; its next read removes the entries that it confirms.

Every method raises StoreUnavailable if the index fails. Lookups use `AsyncResp`, all other
commands redis-py's asyncio client. Use one Index per event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

from baton_kvstore.connection.async_resp import AsyncResp
from baton_kvstore.connection.client import (
    CONNECT_TIMEOUT_S,
    OPERATION_TIMEOUT_S,
    AsyncClient,
    ClosesItself,
)
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp import Reply
from baton_kvstore.connection.server_settings import care
from baton_kvstore.errors import ProtocolBroken, ServerRefused
from baton_kvstore.keys import inbox_key, marker_key, marker_request, probe_key
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId
from baton_protocol.policies import StoreCare
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
    """Markers and inboxes of one pool.

    Concurrent calls in its event loop are safe. Each call ends within `timeout_s`, plus `block_ms`
    of read_inbox(), even if there are many at once. An inbox without a reader is trimmed to about
    `inbox_entries` entries.
    """

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
        # Blocking reads have their own connections, so that they do not use up the others.
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
        """Write a small key to check that the index accepts writes. Raise StoreUnavailable if it
        does not answer or is full."""
        key = probe_key(self._pool, node, epoch)
        await self._client.call(self._client.redis.set(key, b"", px=PROBE_TTL_MS))

    async def run_id(self) -> str:
        """Return the server's run id. It changes with a restart, which loses all content."""
        info: dict[str, str] = await self._client.call(self._client.redis.info("server"))
        return info["run_id"]

    async def tend(self, mode: StoreCare) -> None:
        """Apply or check the server's settings (see `server_settings`). Call it once per run id."""
        conversation = care("index", mode, self._client.label)
        answer: Reply | ServerRefused = None
        try:
            command = next(conversation)
            while True:
                try:
                    answer = await self._lookups.command(*command)
                except ServerRefused as error:
                    answer = error
                command = conversation.send(answer)
        except StopIteration:
            return

    # --- markers ---------------------------------------------------------------------------

    async def lookup(
        self, fingerprint: Fingerprint, chunks: Sequence[BlockHash]
    ) -> list[Marker | None]:
        """Return the chunks' markers with one MGET; None for a missing or unreadable marker."""
        if not chunks:
            return []
        values = await self._lookups.request(marker_request(fingerprint, chunks))
        if not isinstance(values, list) or len(values) != len(chunks):
            raise ProtocolBroken(
                f"{self._client.label} did not answer MGET with a list of {len(chunks)} values"
            )
        decode = self._markers.decode
        try:
            return [None if value is None else decode(value) for value in values]
        except WireError:
            return [self._read(self._markers, value) for value in values]

    async def mark_all(
        self, fingerprint: Fingerprint, marks: Iterable[tuple[BlockHash, Marker, int]]
    ) -> None:
        """Commit chunks whose shards are all acknowledged, in one round trip. `marks` holds (chunk,
        marker, ttl_ms). If it raises, some markers may be written; they are valid."""
        pipeline = self._client.redis.pipeline(transaction=False)
        for chunk, marker, ttl_ms in marks:
            pipeline.set(marker_key(fingerprint, chunk), self._markers.encode(marker), px=ttl_ms)
        if len(pipeline):
            await self._client.call(pipeline.execute())

    async def refresh(
        self, fingerprint: Fingerprint, lifetimes: Iterable[tuple[BlockHash, int]]
    ) -> None:
        """Extend the TTLs of markers whose chunks were fetched, in one round trip, as GETEX did for
        the values. `lifetimes` holds (chunk, ttl_ms)."""
        pipeline = self._client.redis.pipeline(transaction=False)
        for chunk, ttl_ms in lifetimes:
            pipeline.pexpire(marker_key(fingerprint, chunk), ttl_ms)
        if len(pipeline):
            await self._client.call(pipeline.execute())

    async def unmark(self, fingerprint: Fingerprint, chunk: BlockHash, marker: Marker) -> bool:
        """Delete a wrong marker, unless it was overwritten since. Return whether it was deleted.

        The comparison is of encoded bytes. So a marker from a newer version with more fields never
        matches, and stays until it expires.
        """
        key, value = marker_key(fingerprint, chunk), self._markers.encode(marker)
        removed: int = await self._client.call(self._delete_if_equal(keys=[key], args=[value]))
        return bool(removed)

    # --- inboxes ---------------------------------------------------------------------------

    async def announce(self, node: NodeId, epoch: Epoch, entries: Sequence[InboxEntry]) -> None:
        """Append to a decode node's inbox, in order, in one round trip. An inbox without a reader
        keeps about `inbox_entries` entries and expires after INBOX_TTL_S seconds."""
        if not entries:
            return
        key = inbox_key(self._pool, node, epoch)
        # A transaction: if the connection failed before EXPIRE, the stream would never expire.
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
        """Remove the entries with ids `confirmed`, then return the first entries of the inbox.

        The result is up to INBOX_BATCH ids, to confirm with the next call, and the entries that can
        be decoded. If the inbox is empty, wait up to `block_ms` for an entry.

        It reads from the start, never "after the last id", because ids are times of the server's
        clock. If that clock is set back, a stream that expired starts again with lower ids.
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
        """Delete a node's inbox when the node ends."""
        await self._client.call(self._client.redis.delete(inbox_key(self._pool, node, epoch)))

    def _read(self, codec: Codec[T], value: bytes | None) -> T | None:
        if value is None:
            return None
        try:
            return codec.decode(value)
        except WireError as error:
            logger.warning("index %s: %s", self._client.label, error)
            return None
