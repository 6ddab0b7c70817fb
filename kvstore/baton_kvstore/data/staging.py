"""Staging buffers: the bound on bytes in flight.

A transfer thread borrows one for an operation and gives it back; there are never more than
`limit`, so a slow store cannot make a node hold more memory, only wait. The last one given back is
lent first: its pages are warm (in a VM the first touch of a page costs microseconds).
"""

from __future__ import annotations

import threading


class StagingPool:
    """Up to `limit` buffers of `size` bytes, made when first needed."""

    def __init__(self, size: int, limit: int) -> None:
        self._size = size
        self._free: list[memoryview] = []
        self._unmade = limit
        self._closed = False
        self._changed = threading.Condition()

    def borrow(self) -> memoryview | None:
        """Wait for a buffer; None once the pool is closed."""
        with self._changed:
            while not self._closed:
                if self._free:
                    return self._free.pop()
                if self._unmade:
                    self._unmade -= 1
                    return memoryview(bytearray(self._size))
                self._changed.wait()
        return None

    def give_back(self, buffer: memoryview) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
