"""Buffers the deltas of one HTTP answer until its handler writes them. One writer, one reader.

In: deltas of the answer's requests, each with its slot (the prompt's index), ends of requests, and
at most one error. Out: batches of everything that arrived since the last read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import Delta
from baton_router.errors import RequestFailed

Batch = list[tuple[int, Delta]]
Pour = Callable[[Batch], bool]


class OutputQueue:
    """If the client does not read, the queue calls `overflow` once, when more than `max_unread`
    tokens are unread (None: no bound).

    The reader may set `pour`, which takes batches while the reader waits: waking a handler costs
    more than writing a token. If `pour` returns False, the queue wakes the reader for the batch.
    Ends and errors always go to the reader. `open` counts the requests that have not ended.
    """

    def __init__(
        self,
        requests: int,
        max_unread: int | None = None,
        overflow: Callable[[], object] = lambda: None,
    ) -> None:
        self.open = requests
        self.pour: Pour | None = None
        self._max_unread = max_unread
        self._overflow = overflow
        self._unread = 0
        self._items: Batch = []
        self._error: ErrorRecord | None = None
        self._reader: asyncio.Future[bool] | None = None  # False: the wait timed out
        self._since = 0.0  # start of its wait, or its last batch; loop time
        self._timer: asyncio.TimerHandle | None = None
        self._patience_s = 0.0
        self._pouring: asyncio.Handle | None = None

    def put_delta(self, slot: int, delta: Delta) -> None:
        self._items.append((slot, delta))
        self._unread += len(delta.ids)
        if self._max_unread is not None and self._unread > self._max_unread:
            self._max_unread = None
            self._overflow()
        if self.pour is None:
            self._wake()
        elif self._pouring is None and self._reader is not None:
            self._pouring = self._reader.get_loop().call_soon(self._pour, self.pour)

    def end_request(self) -> None:
        self.open -= 1
        self._wake()

    def put_error(self, error: ErrorRecord) -> None:
        """Keep the first error. The reader still gets the deltas that arrived before it."""
        if self._error is None:
            self._error = error
        self._wake()

    @property
    def over(self) -> bool:
        """True if all requests ended without an error and the reader took everything."""
        return self.open <= 0 and not self._items and self._error is None

    async def next_batch(self, patience_s: float | None = None) -> Batch:
        """Wait for deltas. An empty batch means that all requests have ended.

        Raise RequestFailed on an error, and TimeoutError if nothing arrives for `patience_s`
        seconds; the caller may then call again. `patience_s` must not shrink from call to call."""
        while not self._items:
            if self._error is not None:
                raise RequestFailed(self._error)
            if self.open <= 0:
                return []
            if not await self._wait_for_batch(patience_s):
                raise TimeoutError
        batch, self._items, self._unread = self._items, [], 0
        return batch

    def cancel_timers(self) -> None:
        """Cancel the timers once nobody reads the queue."""
        for handle in (self._timer, self._pouring):
            if handle is not None:
                handle.cancel()

    def _wake(self, put: bool = True) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(put)
        self._reader = None

    def _pour(self, pour: Pour) -> None:
        self._pouring = None
        reader = self._reader
        if reader is None or reader.done():
            return  # the reader takes the batch itself
        try:
            taken = pour(self._items)
        except Exception as error:  # our bug; raise it in the reader
            reader.set_exception(error)
            return
        if taken:
            self._items, self._unread = [], 0
            self._since = reader.get_loop().time()
        else:
            self._wake()

    async def _wait_for_batch(self, patience_s: float | None) -> bool:
        """Wait for a batch. One timer serves many waits and is set again only when it fires: a
        timer per token costs as much as the token."""
        loop = asyncio.get_running_loop()
        if patience_s is not None:
            self._since, self._patience_s = loop.time(), patience_s
            if self._timer is None:
                self._timer = loop.call_later(patience_s, self._check_timeout, loop)
        self._reader = loop.create_future()
        try:
            return await self._reader
        finally:
            self._reader = None

    def _check_timeout(self, loop: asyncio.AbstractEventLoop) -> None:
        """Time the reader out, or set the timer again if the reader has not waited long enough."""
        self._timer = None
        if self._reader is None:
            return
        due = self._since + self._patience_s
        if loop.time() < due:
            self._timer = loop.call_at(due, self._check_timeout, loop)
        else:
            self._wake(False)
