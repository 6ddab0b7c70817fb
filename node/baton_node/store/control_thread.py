"""A thread with an asyncio loop of its own, for the index's small commands.

ControlThread  runs coroutines that any thread gives it; each delivers its own result. The step loop
               and the transfer threads never wait for it
WriteBatcher   inside it, small writes that go together: what comes while one is under way is in the
               next, so that a slow server is asked seldom and an idle one at once
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

CLOSE_S = 4.0
CANCEL_S = 0.2

Work = Coroutine[Any, Any, None]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class ControlThread:
    """start() and close() it in one thread; call() and spawn() from any."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepare: Callable[[], None] | None = None
        self._closing = False

    @property
    def closing(self) -> bool:
        return self._closing

    def start(self, prepare: Callable[[], None]) -> None:
        """`prepare` runs first, inside the thread."""
        self._prepare = prepare
        self._thread.start()

    def call(self, act: Callable[[], None]) -> bool:
        """Run `act` in the thread; False when that has ended."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def spawn(self, work: Work) -> bool:
        """Run `work` as a task of the thread; False, and it never runs, if that is closing."""
        if self._closing or not self.call(lambda: self.begin(work)):
            work.close()
            return False
        return True

    def begin(self, work: Work) -> None:
        """spawn() for callers inside the thread."""
        if self._closing:
            work.close()
            return
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self, last: Callable[[], Work]) -> None:
        """Cancel all tasks, run `last()` and end the thread."""
        self._closing = True
        if self._thread.is_alive():
            self.call(lambda: self._end(last))
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._prepare is not None:
            self._prepare()
        self._loop.run_forever()

    def _end(self, last: Callable[[], Work]) -> None:
        ending = self._loop.create_task(self._finish(last))
        ending.add_done_callback(lambda _: self._loop.stop())

    async def _finish(self, last: Callable[[], Work]) -> None:
        until = self._loop.time() + CLOSE_S / 2
        while self._tasks and self._loop.time() < until:
            for task in self._tasks:
                task.cancel()
            # Again where it was swallowed: wait_for() does so when both come at once.
            await asyncio.wait(self._tasks, timeout=CANCEL_S)
        await last()


class WriteBatcher(Generic[K, T]):
    """`begin` starts a task. `write` gets all that has gathered for a key, one call per key at a
    time and in order, and handles its own errors. At most `most` items wait per key."""

    def __init__(
        self,
        begin: Callable[[Work], None],
        write: Callable[[K, list[T]], Awaitable[None]],
        most: int,
    ) -> None:
        self._begin = begin
        self._write = write
        self._most = most
        self._waiting: dict[K, list[T]] = {}

    def add(self, key: K, item: T) -> bool:
        """False where too many wait already."""
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = [item]
            self._begin(self._drain(key))
        elif len(waiting) >= self._most:
            return False
        else:
            waiting.append(item)
        return True

    async def _drain(self, key: K) -> None:
        waiting = self._waiting[key]
        try:
            while waiting:
                batch = list(waiting)
                waiting.clear()
                await self._write(key, batch)
        finally:
            del self._waiting[key]
