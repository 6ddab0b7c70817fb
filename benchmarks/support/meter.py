"""Shared memory and files through which a benchmark communicates with measured processes.

    Meter   two counters in shared memory: bytes that should move, bytes that have moved
    Notes   times (on a clock that all processes share), kept in memory and written at the end

In: a folder, which the environment may name. Out: numbers, at almost no cost to the measured
process.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from pathlib import Path

FOLDER = "BATON_BENCH_FOLDER"
_COUNTER = struct.Struct("@Q")


def folder() -> Path:
    """The shared folder, from this process's environment."""
    return Path(os.environ[FOLDER])


class Meter:
    """Two byte counters in shared memory. Each must have only one writer."""

    def __init__(self, place: Path) -> None:
        path = place / "meter"
        if not path.exists():
            path.write_bytes(bytes(2 * _COUNTER.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 2 * _COUNTER.size)

    @property
    def asked(self) -> int:
        return self._read(0)

    @property
    def moved(self) -> int:
        return self._read(1)

    def ask(self, count: int) -> None:
        """Ask for `count` more bytes to be moved."""
        _COUNTER.pack_into(self._shared, 0, self.asked + count)

    def move(self, count: int) -> None:
        """Report that `count` more bytes have been moved."""
        _COUNTER.pack_into(self._shared, _COUNTER.size, self.moved + count)

    def _read(self, number: int) -> int:
        value: int = _COUNTER.unpack_from(self._shared, number * _COUNTER.size)[0]
        return value


class Notes:
    """Pairs of a time (time.monotonic(), in seconds) and a number."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, at: float, value: float) -> None:
        self._values.append(at)
        self._values.append(value)

    def write(self, path: Path) -> None:
        path.write_bytes(self._values.tobytes())

    @classmethod
    def read(cls, path: Path) -> Notes:
        notes = cls()
        notes._values.frombytes(path.read_bytes())
        return notes

    def between(self, begin: float, end: float) -> list[float]:
        """The numbers noted in [begin, end)."""
        times, values = self._values[::2], self._values[1::2]
        return [value for at, value in zip(times, values, strict=True) if begin <= at < end]

    def times_of(self, wanted: float) -> list[float]:
        """The times at which the number `wanted` was noted."""
        times, values = self._values[::2], self._values[1::2]
        return [at for at, value in zip(times, values, strict=True) if value == wanted]
