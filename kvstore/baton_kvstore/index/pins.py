"""The pinned prefixes of a pool on the index, so that all routers know them, and later ones, too.

A hash lists the ids with the time of each one's last change, so a router that reads it often gets
only the prefixes that it does not know yet: their tokens can be a MB. Each prefix is a key of its
own that ends with the pin. A removed prefix stays as a record without tokens, since a missing one
may only mean that the index has restarted: routers then write what they know again.

Each method raises StoreUnavailable if the index fails. Use one Pins per event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from baton_kvstore.connection.client import OPERATION_TIMEOUT_S, AsyncClient, ClosesItself
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.keys import LONGEST_PIN_S, pin_key, pins_key
from baton_protocol.store import MAX_PINS, PinnedPrefix
from baton_protocol.wire import Codec, WireError

logger = logging.getLogger(__name__)
MOST_LISTED = 4 * MAX_PINS  # removed ones are listed until their time is over


class Pins(ClosesItself):
    """The pinned prefixes of one pool."""

    def __init__(self, url: str, pool: str, *, timeout_s: float = OPERATION_TIMEOUT_S) -> None:
        self._pool = pool
        self._client = AsyncClient(parse_endpoint(url), timeout_s=timeout_s, max_connections=2)
        self._records: Codec[PinnedPrefix] = Codec(PinnedPrefix)

    async def close(self) -> None:
        await self._client.close()

    async def put(self, record: PinnedPrefix, ttl_s: float) -> None:
        """Write a record, which stays for `ttl_s` seconds."""
        lifetime = max(1, int(min(ttl_s, LONGEST_PIN_S) * 1000))
        pipeline = self._client.redis.pipeline(transaction=True)
        key = pin_key(self._pool, record.id)
        pipeline.set(key, self._records.encode(record), px=lifetime)
        pipeline.hset(pins_key(self._pool), record.id, str(record.changed))
        pipeline.expire(pins_key(self._pool), LONGEST_PIN_S)
        await self._client.call(pipeline.execute())

    async def list_ids(self) -> dict[str, int]:
        """The ids, each with the time of its last change."""
        found: dict[bytes, bytes] = await self._client.call(
            self._client.redis.hgetall(pins_key(self._pool))
        )
        items = list(found.items())[:MOST_LISTED]
        return {id.decode(errors="replace"): int(at) for id, at in items if at.isdigit()}

    async def read_changed(
        self, listed: Mapping[str, int], known: Mapping[str, int]
    ) -> list[PinnedPrefix]:
        """The listed records that changed after the caller knew them. Ids whose record has expired
        leave the list."""
        ids = [id for id, at in listed.items() if at > known.get(id, -1)]
        if not ids:
            return []
        keys = [pin_key(self._pool, id) for id in ids]
        values = await self._client.call(self._client.redis.mget(keys))
        ended = [id for id, value in zip(ids, values, strict=True) if value is None]
        if ended:
            await self._client.call(self._client.redis.hdel(pins_key(self._pool), *ended))
        records = [self._read(value) for value in values if value is not None]
        return [record for record in records if record is not None]

    def _read(self, value: bytes) -> PinnedPrefix | None:
        try:
            return self._records.decode(value)
        except WireError as error:
            logger.warning("index %s: %s", self._client.label, error)
            return None
