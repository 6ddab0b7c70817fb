"""The books of a pool on the index: one hash per day, with an entry per start of a node or router.

An entry holds everything that its writer has counted since the entry began. So a write that is
repeated, or whose reply is lost, counts once. The index server's clock says which day it is, and
all writers go on to the next day's hash within a write of midnight. A writer that finds the index
away counts on: all of it is in the entry once the index is back, under the day before.

Each method raises StoreUnavailable if the index fails. Use one object per event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton_kvstore.connection.async_resp import AsyncResp
from baton_kvstore.connection.client import (
    CONNECT_TIMEOUT_S,
    OPERATION_TIMEOUT_S,
    AsyncClient,
    ClosesItself,
)
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.errors import ProtocolBroken, StoreError
from baton_kvstore.keys import usage_key
from baton_protocol.usage import UsageEntry
from baton_protocol.wire import Codec, WireError

logger = logging.getLogger(__name__)
KEPT_DAYS = 90
DAY_S = 86400
LAST_WRITE_S = 1.0
MOST_BYTES = 64 << 20  # of one day
READ_TIMEOUT_S = 10.0
# KEYS: a day's hash. ARGV: the entry's name, its value, how long the hash stays (s). The hash ends
# KEPT_DAYS after its last write. Returns today.
_WRITE = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return math.floor(redis.call('TIME')[1] / 86400)
"""


class UsageBooks(ClosesItself):
    """The books of one pool. Days are counted from 1970, in UTC."""

    def __init__(self, url: str, pool: str, *, timeout_s: float = OPERATION_TIMEOUT_S) -> None:
        self._pool = pool
        endpoint = parse_endpoint(url)
        self._client = AsyncClient(endpoint, timeout_s=timeout_s, max_connections=2)
        self._reads = AsyncResp(
            endpoint,
            timeout_s=max(READ_TIMEOUT_S, timeout_s),
            connect_timeout_s=CONNECT_TIMEOUT_S,
            most_bytes=MOST_BYTES,
        )
        self._entries: Codec[UsageEntry] = Codec(UsageEntry)
        self._write = self._client.redis.register_script(_WRITE)

    async def close(self) -> None:
        self._reads.close()
        await self._client.close()

    async def today(self) -> int:
        seconds, _ = await self._client.call(self._client.redis.time())
        return int(seconds) // DAY_S

    async def write(self, day: int, name: str, entry: UsageEntry) -> int:
        """Replace the entry of this name in a day's books. Returns today."""
        args = [name, self._entries.encode(entry), (KEPT_DAYS + 1) * DAY_S]
        return int(
            await self._client.call(self._write(keys=[usage_key(self._pool, day)], args=args))
        )

    async def read(self, day: int) -> list[UsageEntry]:
        """All entries of a day. Invalid ones are left out, with a line in the log."""
        values = await self._reads.command(b"HVALS", usage_key(self._pool, day))
        if not isinstance(values, list):
            raise ProtocolBroken(f"{self._client.label}: the books of a day are not a list")
        entries, wrong = [], ""
        for value in values:
            try:
                entries.append(self._entries.decode(value or b""))
            except WireError as error:
                wrong = str(error)
        if wrong:
            left_out = len(values) - len(entries)
            logger.warning("books of day %d: ignoring %d entries: %s", day, left_out, wrong)
        return entries


class UsageWriter:
    """Keeps what one process counts in the books. `total` returns everything since the start of
    the process, and `name` no other process has ever had."""

    def __init__(self, books: UsageBooks, name: str, total: Callable[[], UsageEntry]) -> None:
        self._books = books
        self._name = name
        self._total = total
        self._day: int | None = None
        self._entries = 0
        self._began: UsageEntry | None = None  # the total when the day's entry began
        self._turn = asyncio.Lock()

    async def write(self) -> None:
        """Bring the books up to date."""
        async with self._turn:
            await self._write()

    async def _write(self) -> None:
        total = self._total()
        if self._day is None:
            self._day = await self._books.today()
        entry = total if self._began is None else total.since(self._began)
        if entry.times or entry.tokens:  # also if nothing is new: an index may start again, empty
            name = f"{self._name}:{self._entries}"
            today = await self._books.write(self._day, name, entry)
        else:
            today = await self._books.today()
        if today != self._day:
            # A new name, as a clock that was set back may come to the same day again.
            self._day, self._began, self._entries = today, total, self._entries + 1

    async def keep_written(self, every_s: float) -> None:
        """Write until cancelled. Log once when the index becomes unavailable."""
        away = False
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.write()
                away = False
            except StoreError as error:
                if not away:
                    logger.warning("cannot write the books, and count on: %s", error)
                away = True

    async def write_last(self) -> None:
        """Write at a clean end, if the index answers within LAST_WRITE_S."""
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await self.write()
        except (StoreError, TimeoutError) as error:
            logger.warning("the books lack the last moments: %s", error or "timeout")
