"""Watches the memory of a pool's processes over time, and shortens the life of its store's markers.

In: a pool with an embedded store. Out: the mean memory in the first and in the last quarter of a
period, per process, and per store server also by its own count; and each server's evictions.

A marker in the index outlives its chunk by up to an hour, so the index grows for an hour before it
is level. The watch therefore shortens all TTLs to `marker_life_s`, again and again. It leaves out
the memory of live markers, because that follows the rate of requests.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
import redis

from tests.support.pools.baton_up import Pool

MIB = 1 << 20
SAMPLE_S = 1.0
MARKER_BYTES = 290  # measured used_memory of a marker: key, value, TTL, entries in two tables


@dataclass(frozen=True)
class Course:
    """The mean memory in the first and in the last quarter, in bytes."""

    first: float
    last: float

    @property
    def growth(self) -> float:
        """The relative growth: 0.05 means 5 % more."""
        return self.last / self.first - 1

    def __str__(self) -> str:
        return f"{self.first / MIB:.1f} -> {self.last / MIB:.1f} MiB ({self.growth:+.1%})"


class MemoryWatch:
    """`with MemoryWatch(pool, life) as watch:` samples every second until the block ends.
    `failure` is the exception that ended the sampling early, or None."""

    def __init__(self, pool: Pool, marker_life_s: float) -> None:
        self._pool = pool
        self._life_ms = int(marker_life_s * 1000)
        self._sockets = {path.stem: path for path in sorted(pool.temporary.rglob("*.sock"))}
        assert "index" in self._sockets, self._sockets
        self._samples: list[dict[str, int]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory")
        self.failure: BaseException | None = None

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()

    def begin(self) -> None:
        """Drop all earlier samples."""
        self._samples = []

    def courses(self) -> dict[str, Course]:
        """The course of each process; raise AssertionError if processes started or ended."""
        assert self.failure is None, self.failure
        samples = self._samples
        quarter = len(samples) // 4
        assert quarter > 0, f"{len(samples)} samples"
        everywhere = set(samples[0]).union(*samples)
        assert all(set(sample) == everywhere for sample in samples), "processes started or ended"
        return {
            name: Course(_mean(samples[:quarter], name), _mean(samples[-quarter:], name))
            for name in sorted(everywhere)
        }

    def highest(self, name: str) -> int:
        return max(sample[name] for sample in self._samples)

    @property
    def data(self) -> list[str]:
        """The data servers' names."""
        return [name for name in self._sockets if name != "index"]

    def evicted(self, name: str) -> int:
        with _client(self._sockets[name]) as client:
            return int(client.info("stats")["evicted_keys"])

    def limit(self, name: str) -> int:
        with _client(self._sockets[name]) as client:
            return int(client.config_get("maxmemory")["maxmemory"])

    def _run(self) -> None:
        try:
            while not self._ending.wait(SAMPLE_S):
                self._samples.append(self._sample(self._age_markers() * MARKER_BYTES))
        except BaseException as error:
            self.failure = error
            raise

    def _sample(self, marker_bytes: int) -> dict[str, int]:
        sample = {}
        for process in self._pool.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                sample[_name(process)] = process.memory_info().rss
        for name, path in self._sockets.items():
            with _client(path) as client:
                memory = client.info("memory")
            excluded = marker_bytes if name == "index" else 0
            sample[used(name)] = int(memory["used_memory"]) - excluded
            # Not from the process: Redis overwrites its environment, and thus its mark, with a
            # title.
            sample[f"{name}'s resident memory"] = int(memory["used_memory_rss"]) - excluded
        return sample

    def _age_markers(self) -> int:
        """Shorten the markers' TTLs to the life given, and return the number of markers."""
        with _client(self._sockets["index"]) as client:
            keys = list(client.scan_iter("kv1:*", count=1000))
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.pttl(key)
            for key, left in zip(keys, pipeline.execute(), strict=True):
                if left > self._life_ms:
                    pipeline.pexpire(key, self._life_ms)
            pipeline.execute()
            return len(keys)


def used(name: str) -> str:
    """The name, among the courses, of a server's own count of its memory."""
    return f"{name}'s used_memory"


def _name(process: psutil.Process) -> str:
    """Name a process by the distinctive part of its command line and its pid."""
    arguments = process.cmdline()[1:]
    node = [argument for argument in arguments if argument.startswith("--node=")]
    return " ".join([*(node or arguments[:4]), f"(pid {process.pid})"])


def _client(path: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(path), socket_timeout=10.0)


def _mean(samples: list[dict[str, int]], name: str) -> float:
    return sum(sample[name] for sample in samples) / len(samples)
