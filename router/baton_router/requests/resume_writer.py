"""Writes the entries of all resumable streams of this router to the index.

In: entries of streams, each with the events that wait for it. Out: one command for all that came
since the last one, and then their results. Streams whose events need not wait write together, twice
a second. What a client has, any router can repeat.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.index.resume_log import GONE, KEPT, Append, ResumeLog

# A stream's head waits this long for those of others. Its nodes compute the prompt meanwhile.
BEGIN_S = 0.01
RENEW_S = 1.0
# How late deltas that nobody waits for are written. Who continues a stream computes as much again.
LATE_S = 0.5
# Between two commands, so that streams of many nodes share them: one takes 100 us.
PAUSE_S = 0.002
# Streams of one router, and those that ended and whose lifetime has not. The index keeps all its
# data in memory, and refuses writes when that is full.
MAX_KEPT_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class OwnStream(Protocol):
    """A stream of this router."""

    def on_result(self, result: int, events: bytes) -> None:
        """KEPT, GONE (also if the index fails) or FENCED: what became of an append, and the events
        that waited for it."""
        ...

    def renew(self) -> None: ...

    def write_out(self) -> None:
        """Append all that was to be written later."""
        ...

    def take(self) -> None:
        """Another call continues the stream."""
        ...


class ResumeWriter:
    """`live` holds the streams that the router owns, by id. `kept_bytes` counts what they and those
    that ended lately hold on the index."""

    def __init__(self, log: ResumeLog, clock: Callable[[], float]) -> None:
        self.log = log
        self.live: dict[str, OwnStream] = {}
        self.kept_bytes = 0
        self._clock = clock
        self._ended: deque[tuple[float, int]] = deque()
        self._pending: list[tuple[OwnStream, Append, bytes]] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._late: list[OwnStream] = []
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._sent_at = 0.0  # loop time
        self._due = math.inf  # when to send the next command, in loop time

    def append(
        self, stream: OwnStream, append: Append, events: bytes = b"", within_s: float = 0.0
    ) -> None:
        """Write what follows in the stream. Results come in the order of the appends."""
        self._pending.append((stream, append, events))
        now = asyncio.get_running_loop().time() if within_s else 0.0
        self._due = min(self._due, now + within_s)
        if self._task is None:
            self._task = asyncio.create_task(self._send())

    def write_later(self, stream: OwnStream) -> None:
        """Let the stream write with all others that nobody waits for."""
        self._late.append(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATE_S, self.write_out)

    @property
    def behind(self) -> bool:
        """Whether streams have more to write than was appended."""
        return bool(self._late)

    def write_out(self) -> None:
        """Let all streams append what was to be written later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        late, self._late = self._late, []
        for stream in late:
            stream.write_out()

    async def written(self) -> None:
        """Wait until all appends so far have their results."""
        if self._task is not None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def has_room(self, size: int) -> bool:
        """Whether another stream may begin with this many bytes."""
        now = self._clock()
        while self._ended and self._ended[0][0] <= now:
            self.kept_bytes -= self._ended.popleft()[1]
        return self.kept_bytes + size <= MAX_KEPT_BYTES

    def retire(self, id: str, size: int, lifetime_s: float) -> None:
        """The router no longer owns this stream, which the index keeps for its lifetime."""
        self.live.pop(id, None)
        self._ended.append((self._clock() + lifetime_s, size))

    def take(self, id: str) -> None:
        """Another call of this router continues the stream: end the one that has it."""
        if id in self.live:
            self.live[id].take()

    async def keep_renewed(self) -> None:
        """Renew the lifetimes of all streams forever, and notice those that were taken."""
        while True:
            await asyncio.sleep(RENEW_S)
            for stream in list(self.live.values()):
                stream.renew()

    async def close(self) -> None:
        self.write_out()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self.log.close()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._pending or self._waiters:
                send_at = max(self._sent_at + PAUSE_S, self._due)
                if self._pending and (early_s := send_at - loop.time()) > 0:
                    await asyncio.sleep(early_s)
                batch, self._pending = self._pending, []
                waiters, self._waiters = self._waiters, []
                if batch:
                    self._sent_at, self._due = loop.time(), math.inf
                    results = await self._write([append for _, append, _ in batch])
                    for (stream, _, events), result in zip(batch, results, strict=True):
                        try:
                            stream.on_result(result, events)
                        except Exception:  # our bug; the other streams go on
                            logger.exception("writing a kept stream failed")
                for waiter in waiters:
                    if not waiter.done():  # else its call was cancelled
                        waiter.set_result(None)
        finally:
            self._task = None

    async def _write(self, appends: list[Append]) -> list[int]:
        try:
            return await self.log.append(appends)
        except StoreUnavailable as error:
            logger.warning("streams can no longer be resumed: %s", error)
            # A renewal may fail: the stream has not changed.
            return [GONE if entry else KEPT for _, _, _, _, entry in appends]
