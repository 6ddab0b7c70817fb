"""What the store holds, asked of the index with a short deadline: one MGET per HTTP request.

In: chunk hashes. Out: one boolean each; all False where the answer is not there in time, which
costs a worse placement and nothing else. A late answer is a busy machine and says that the index
lives; one that fails repeatedly is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton_kvstore.errors import StoreError
from baton_protocol.ids import BlockHash, Fingerprint
from baton_protocol.store import Marker

# So many failures in a row are an index that is down.
FAILURES = 3
RETRY_S = 1.0
# So many at once: when a node is lost all its requests ask, and what queues in the client is late.
LOOKUPS = 4

logger = logging.getLogger(__name__)


class MarkerIndex(Protocol):
    """The part of baton_kvstore.Index that the router uses."""

    async def lookup(
        self, fingerprint: Fingerprint, chunks: Sequence[BlockHash]
    ) -> list[Marker | None]: ...


class Markers:
    """`up` is None until the index was asked, or where the router has none."""

    def __init__(
        self, index: MarkerIndex | None, *, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._index = index
        self._timeout_s = timeout_s
        self._clock = clock
        self._failures = 0
        self._retry_at = 0.0
        self._turn = asyncio.Semaphore(LOOKUPS)
        self._late: set[asyncio.Task[list[bool] | None]] = set()
        self.up: bool | None = None

    async def stored(self, fingerprint: Fingerprint, chunks: Sequence[BlockHash]) -> list[bool]:
        if self._index is None or not chunks:
            return [False] * len(chunks)
        async with self._turn:
            if self.up is False and self._clock() < self._retry_at:
                return [False] * len(chunks)
            asking = asyncio.create_task(self._ask(self._index, fingerprint, chunks))
            self._late.add(asking)
            asking.add_done_callback(self._late.discard)
            await asyncio.wait({asking}, timeout=self._timeout_s)
        found = asking.result() if asking.done() else None
        return found if found is not None else [False] * len(chunks)

    async def close(self) -> None:
        """Wait for no answer any more."""
        for asking in self._late:
            asking.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    async def _ask(
        self, index: MarkerIndex, fingerprint: Fingerprint, chunks: Sequence[BlockHash]
    ) -> list[bool] | None:
        """None where the index failed, which it does by itself after about a second."""
        try:
            found = await index.lookup(fingerprint, chunks)
        except StoreError as error:
            self._failed(str(error))
            return None
        self._failures, self.up = 0, True
        return [marker is not None for marker in found]

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self._retry_at = self._clock() + RETRY_S
        if self._failures >= FAILURES and self.up is not False:
            self.up = False
            logger.warning("the store's index is left alone for a while: %s", reason)
