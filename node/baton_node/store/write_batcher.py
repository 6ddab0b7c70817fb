"""Batches small writes: items that arrive during a write go into the next one.

In: items by key. Out: writes, one at a time per key. So an idle server gets an item at once, and a
slow server gets few, large writes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from baton_node.store.control_thread import Work

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class WriteBatcher(Generic[K, T]):
    """Collects items per key while the key's previous write is in progress.

    `begin` starts a task. `write` gets a key and all items that have collected for it, in order;
    calls for one key do not overlap. It must handle its own errors. At most `most` items wait per
    key. Belongs to one event loop.
    """

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
        """Add an item. Return False, and drop it, if `most` items wait for the key already."""
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
