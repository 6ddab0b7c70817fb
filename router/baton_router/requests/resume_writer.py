"""Writes the entries of all resumable streams of this router to the index.

In: entries of streams, each with a function that is told what became of it. Out: one command for
all that came since the last one. An event waits for its entry: what a client has, any router can
repeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.index.resume_log import GONE, Append, ResumeLog

RENEW_S = 1.0
# Streams of one router, and those that ended and whose lifetime has not. The index keeps all its
# data in memory, and refuses writes when that is full.
MAX_KEPT_BYTES = 64 << 20

Done = Callable[[int], None]
logger = logging.getLogger(__name__)


class Renewed(Protocol):
    """A stream of this router."""

    def renew(self) -> None: ...

    def take(self) -> None:
        """Another call continues the stream."""
        ...


class ResumeWriter:
    """`live` holds the streams that the router owns, by id. `kept_bytes` counts what they and those
    that ended lately hold on the index."""

    def __init__(self, log: ResumeLog, clock: Callable[[], float]) -> None:
        self.log = log
        self.live: dict[str, Renewed] = {}
        self.kept_bytes = 0
        self._clock = clock
        self._ended: deque[tuple[float, int]] = deque()
        self._pending: list[tuple[Append, Done]] = []
        self._task: asyncio.Task[None] | None = None

    def append(self, append: Append, done: Done) -> None:
        """Write the entry; `done` gets KEPT, GONE (also if the index fails) or FENCED. The calls
        come in the order of the appends."""
        self._pending.append((append, done))
        if self._task is None:
            self._task = asyncio.create_task(self._send())

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
        """Renew the lifetimes of all streams for ever, and notice those that were taken."""
        while True:
            await asyncio.sleep(RENEW_S)
            for stream in list(self.live.values()):
                stream.renew()

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self.log.close()

    async def _send(self) -> None:
        try:
            while self._pending:
                batch, self._pending = self._pending, []
                try:
                    results = await self.log.append([append for append, _ in batch])
                except StoreUnavailable as error:
                    logger.warning("streams can no longer be resumed: %s", error)
                    results = [GONE] * len(batch)
                for (append, done), result in zip(batch, results, strict=True):
                    try:
                        done(result)
                    except Exception:  # our bug; the other streams go on
                        logger.exception("writing a stream failed", extra={"request": append.id})
        finally:
            self._task = None
