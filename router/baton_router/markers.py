"""What the store holds, asked of the index with a short deadline: one MGET per HTTP request.

In: chunk hashes. Out: one boolean each; all False where the index is silent, which costs a worse
placement and nothing else. An index that fails repeatedly is left alone for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from baton_kvstore.errors import StoreError
from baton_protocol.ids import BlockHash, Fingerprint
from baton_protocol.store import Marker

# One late answer is a busy machine; this many failures in a row are an index that is down.
FAILURES = 3
RETRY_S = 1.0

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
        self.up: bool | None = None

    async def stored(self, fingerprint: Fingerprint, chunks: Sequence[BlockHash]) -> list[bool]:
        if self._index is None or not chunks:
            return [False] * len(chunks)
        if self.up is False and self._clock() < self._retry_at:
            return [False] * len(chunks)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._index.lookup(fingerprint, chunks)
        except (StoreError, TimeoutError) as error:
            self._failed(str(error) or "no answer in time")
            return [False] * len(chunks)
        self._failures, self.up = 0, True
        return [marker is not None for marker in found]

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self._retry_at = self._clock() + RETRY_S
        if self._failures >= FAILURES and self.up is not False:
            self.up = False
            logger.warning("the store's index is left alone for a while: %s", reason)
