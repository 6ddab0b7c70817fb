"""Work that goes on when the client that asked for it leaves: tasks that the router owns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class DetachedWork:
    """Holds each task until it ends. A caller that awaits one does so through asyncio.shield()."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def cancel_all(self, patience_s: float = 0.0) -> None:
        """End all work that does not end by itself in time, and wait until it has ended."""
        if patience_s and self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
