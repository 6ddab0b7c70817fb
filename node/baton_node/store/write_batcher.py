"""Small writes that go together: what comes while one is under way is in the next.

In: items, in one event loop. Out: calls of a coroutine, for each key one at a time and in order,
with all that has gathered for it: a slow server is asked seldom, an idle one at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from baton_node.store.loop_thread import Work

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class WriteBatcher(Generic[K, T]):
    """`begin` starts a task; `write` handles its own errors. At most `most` items wait per key."""

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
