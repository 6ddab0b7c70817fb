"""StagingPool: lends the staging buffers of transfers, and so bounds the bytes in flight."""

from __future__ import annotations

import threading


class StagingPool:
    """A pool of staging buffers, which bounds the bytes in flight.

    It has up to `limit` buffers of `size` bytes, allocated on demand. A transfer thread borrows one
    for an operation and gives it back, so a slow store makes transfers wait instead of memory grow.
    The buffer returned last is lent first: its pages are warm (in a VM the first access to a page
    costs microseconds).
    """

    def __init__(self, size: int, limit: int) -> None:
        self._size = size
        self._free: list[memoryview] = []
        self._unmade = limit
        self._closed = False
        self._changed = threading.Condition()

    def borrow_buffer(self) -> memoryview | None:
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

    def return_buffer(self, buffer: memoryview) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
