"""What the nodes produced for one HTTP answer, until its handler writes it. One writer, one reader.

In: deltas of the answer's requests, each with its slot (the prompt's index), their ends, or one
error. Out: batches, as large as what arrived since the reader last looked. A reader that does not
look, since its client does not read, is reported: what waits for it is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_router.errors import RequestFailed

Batch = list[tuple[int, Delta]]


class Outbox:
    """`open` counts the requests that have not ended. With more than `most` tokens unread (None:
    there is no bound) `overflow` is called, once."""

    def __init__(
        self,
        requests: int,
        most: int | None = None,
        overflow: Callable[[], object] = lambda: None,
    ) -> None:
        self.open = requests
        self._most = most
        self._overflow = overflow
        self._unread = 0
        self._items: Batch = []
        self._error: ErrorRecord | None = None
        self._reader: asyncio.Future[bool] | None = None  # waits; False: for too long

    def put(self, slot: int, delta: Delta) -> None:
        self._items.append((slot, delta))
        self._unread += len(delta.ids)
        if self._most is not None and self._unread > self._most:
            self._most = None
            self._overflow()
        self._wake()

    def end(self) -> None:
        self.open -= 1
        self._wake()

    def fail(self, error: ErrorRecord) -> None:
        """The first error counts; what arrived before it is still delivered."""
        if self._error is None:
            self._error = error
        self._wake()

    @property
    def over(self) -> bool:
        """All requests have ended well, and everything of them was taken."""
        return self.open <= 0 and not self._items and self._error is None

    async def next(self, patience_s: float | None = None) -> Batch:
        """Wait for more; an empty batch means that all requests ended. Raise RequestFailed, or
        TimeoutError where nothing came for `patience_s`; a later call goes on waiting."""
        while not self._items:
            if self._error is not None:
                raise RequestFailed(self._error)
            if self.open <= 0:
                return []
            if not await self._woken(patience_s):
                raise TimeoutError
        batch, self._items, self._unread = self._items, [], 0
        return batch

    def _wake(self, put: bool = True) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(put)
        self._reader = None

    async def _woken(self, patience_s: float | None) -> bool:
        """A future and a timer: an event and a timeout cost a stream of tokens twice as much."""
        loop = asyncio.get_running_loop()
        timer = None
        if patience_s is not None:
            timer = loop.call_later(patience_s, self._wake, False)
        reader: asyncio.Future[bool] = loop.create_future()
        self._reader = reader
        try:
            return await reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()
