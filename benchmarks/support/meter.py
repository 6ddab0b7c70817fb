"""What a benchmark and the processes it watches tell each other, in a folder that they share.

    Meter   two counters in shared memory: bytes that should move, bytes that have moved
    Notes   times (of one clock for all processes), kept in memory and written at the end

In: a folder, also through the environment. Out: numbers, at no cost to whoever is measured.
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
    """The one that this process was started with."""
    return Path(os.environ[FOLDER])


class Meter:
    """Each counter has one writer."""

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
        """Let so many bytes more move."""
        _COUNTER.pack_into(self._shared, 0, self.asked + count)

    def move(self, count: int) -> None:
        """So many bytes more have moved."""
        _COUNTER.pack_into(self._shared, _COUNTER.size, self.moved + count)

    def _read(self, number: int) -> int:
        value: int = _COUNTER.unpack_from(self._shared, number * _COUNTER.size)[0]
        return value


class Notes:
    """Pairs of a time (time.monotonic()) and a number."""

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
        """Numbers of that time."""
        times, values = self._values[::2], self._values[1::2]
        return [value for at, value in zip(times, values, strict=True) if begin <= at < end]

    def times_of(self, wanted: float) -> list[float]:
        """When that number was noted."""
        times, values = self._values[::2], self._values[1::2]
        return [at for at, value in zip(times, values, strict=True) if value == wanted]
