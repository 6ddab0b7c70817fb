"""Asks the index which chunks the store holds.

In: chunk hashes of a prompt. Out: one boolean each, by a deadline. A busy or lost index costs a
worse placement, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton_kvstore.errors import StoreError
from baton_kvstore.index.markers import Index
from baton_protocol.ids import BlockHash, Fingerprint

# This many failures in a row mean that the index is down.
FAILURES = 3
RETRY_S = 1.0
# Concurrent lookups: when a node is lost, all its requests query at once, and the client's queue
# would make them late.
LOOKUPS = 4

logger = logging.getLogger(__name__)


class MarkerLookup:
    """Asks the index which chunks the store holds: one MGET per HTTP request, with a deadline.

    In: chunk hashes. Out: one boolean each; all False if the answer is late, which only costs a
    worse placement. A late answer means a busy machine and still shows that the index is up. After
    FAILURES failures in a row the index is not asked for RETRY_S seconds.

    `up` is None before the first answer, or if the router has no index.
    """

    def __init__(
        self, index: Index | None, *, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._index = index
        self._timeout_s = timeout_s
        self._clock = clock
        self._failures = 0
        self._retry_at = 0.0
        self._turn = asyncio.Semaphore(LOOKUPS)
        self._lookups: set[asyncio.Task[list[bool] | None]] = set()
        self.up: bool | None = None

    async def find_stored(
        self, fingerprint: Fingerprint, chunks: Sequence[BlockHash]
    ) -> list[bool]:
        if self._index is None or not chunks:
            return [False] * len(chunks)
        async with self._turn:
            if self.up is False and self._clock() < self._retry_at:
                return [False] * len(chunks)
            lookup = asyncio.create_task(self._lookup(self._index, fingerprint, chunks))
            self._lookups.add(lookup)
            lookup.add_done_callback(self._lookups.discard)
            await asyncio.wait({lookup}, timeout=self._timeout_s)
        result = lookup.result() if lookup.done() else None
        return result if result is not None else [False] * len(chunks)

    async def cancel_lookups(self) -> None:
        """Cancel lookups that are still open."""
        for lookup in self._lookups:
            lookup.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)

    async def _lookup(
        self, index: Index, fingerprint: Fingerprint, chunks: Sequence[BlockHash]
    ) -> list[bool] | None:
        """Whether the index has each chunk; None if it failed, which takes about a second."""
        try:
            markers = await index.lookup(fingerprint, chunks)
        except StoreError as error:
            self._failed(str(error))
            return None
        self._failures, self.up = 0, True
        return [marker is not None for marker in markers]

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self._retry_at = self._clock() + RETRY_S
        if self._failures >= FAILURES and self.up is not False:
            self.up = False
            logger.warning("the store's index failed repeatedly; pausing lookups: %s", reason)
