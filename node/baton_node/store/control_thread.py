"""A thread with an asyncio loop, which runs coroutines from any thread.

In: coroutines, each of which delivers its own result. Out: tasks of the loop. The step loop and the
transfer threads hand their work on the index over to it and never wait for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

CLOSE_S = 4.0
CANCEL_S = 0.2
Work = Coroutine[Any, Any, None]


class ControlThread:
    """A thread with an asyncio loop. Call start() and close() in one thread, call_soon() and
    spawn_task() in any."""

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
        """Start the thread, which calls `prepare` first."""
        self._prepare = prepare
        self._thread.start()

    def call_soon(self, act: Callable[[], None]) -> bool:
        """Run `act` in the thread. Return False if the thread has ended."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def spawn_task(self, work: Work) -> bool:
        """Run `work` as a task of the thread. Return False, and drop it, if the thread is
        closing."""
        if self._closing or not self.call_soon(lambda: self.begin_task(work)):
            work.close()
            return False
        return True

    def begin_task(self, work: Work) -> None:
        """spawn_task() for callers inside the thread."""
        if self._closing:
            work.close()
            return
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self, last: Callable[[], Work]) -> None:
        """Cancel all tasks, run `last()` and end the thread. Wait at most CLOSE_S."""
        self._closing = True
        if self._thread.is_alive():
            self.call_soon(lambda: self._end(last))
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
            # Cancel again if a task swallowed it: wait_for() does so if it completes meanwhile.
            await asyncio.wait(self._tasks, timeout=CANCEL_S)
        await last()
