"""What the nodes produced for one HTTP answer, until its handler writes it. One writer, one reader.

In: deltas of the answer's requests, each with its slot (the prompt's index), their ends, or one
error. Out: batches, as large as what arrived since the reader last looked. A reader that does not
look, since its client does not read, is reported: what waits for it is bounded.

A reader that has begun to write may leave a `pour` for what comes while it waits: waking a handler
costs more than writing a token does.
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
    """`open` counts the requests that have not ended. With more than `most` tokens unread (None:
    there is no bound) `overflow` is called, once. `pour` takes a batch, or says False, and then the
    reader is woken for it; ends and errors are the reader's."""

    def __init__(
        self,
        requests: int,
        most: int | None = None,
        overflow: Callable[[], object] = lambda: None,
    ) -> None:
        self.open = requests
        self.pour: Pour | None = None
        self._most = most
        self._overflow = overflow
        self._unread = 0
        self._items: Batch = []
        self._error: ErrorRecord | None = None
        self._reader: asyncio.Future[bool] | None = None  # waits; False: for too long
        self._since = 0.0  # when it began to, in the loop's time
        self._timer: asyncio.TimerHandle | None = None
        self._pouring: asyncio.Handle | None = None

    def put(self, slot: int, delta: Delta) -> None:
        self._items.append((slot, delta))
        self._unread += len(delta.ids)
        if self._most is not None and self._unread > self._most:
            self._most = None
            self._overflow()
        if self.pour is None:
            self._wake()
        elif self._pouring is None and self._reader is not None:
            self._pouring = self._reader.get_loop().call_soon(self._pour, self.pour)

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
        TimeoutError where nothing came for `patience_s`, which is the same for all calls; a later
        call goes on waiting."""
        while not self._items:
            if self._error is not None:
                raise RequestFailed(self._error)
            if self.open <= 0:
                return []
            if not await self._woken(patience_s):
                raise TimeoutError
        batch, self._items, self._unread = self._items, [], 0
        return batch

    def close(self) -> None:
        """Nobody reads any more."""
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
            return  # it takes the batch itself
        try:
            taken = pour(self._items)
        except Exception as error:  # our bug, told where the reader's own would be
            reader.set_exception(error)
            return
        if taken:
            self._items, self._unread = [], 0
            self._since = reader.get_loop().time()
        else:
            self._wake()

    async def _woken(self, patience_s: float | None) -> bool:
        """One timer serves many waits, and is set again when it has run: one for each token costs
        as much as the token."""
        loop = asyncio.get_running_loop()
        if patience_s is not None:
            self._since = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(patience_s, self._look, loop, patience_s)
        self._reader = loop.create_future()
        try:
            return await self._reader
        finally:
            self._reader = None

    def _look(self, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        """Whether the reader has waited for so long."""
        self._timer = None
        if self._reader is None:
            return
        due = self._since + patience_s
        if loop.time() < due:
            self._timer = loop.call_at(due, self._look, loop, patience_s)
        else:
            self._wake(False)
