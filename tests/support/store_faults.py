"""The store of a cluster, and what can befall it.

In: "index", "data" or "both". Out: servers that die (and come back empty, as their guardian starts
them again), stay away, freeze, or have no byte left. mend() undoes all of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Literal, get_args

import psutil
import redis

from baton_kvstore.embedded import EmbeddedStore

Which = Literal["index", "data", "both"]
WAIT_S = 20.0
JUNK = "junk"
MIB = 1 << 20
# Left over what is used when a server is to become full; its own buffers take part of it.
HEADROOM = MIB


class FaultyStore:
    """An EmbeddedStore with one data server."""

    def __init__(self, memory: int = 256 * MIB) -> None:
        self.servers = EmbeddedStore(memory)
        self._frozen: set[int] = set()
        self._full: set[str] = set()

    def start(self) -> None:
        self.servers.start()

    def stop(self) -> None:
        self.mend()
        self.servers.stop()

    def flags(self) -> list[str]:
        settings = self.servers.settings
        return [f"--redis-index={settings.index_url}", f"--redis-data={settings.data_urls[0]}"]

    @contextlib.contextmanager
    def client(self, name: str) -> Iterator[redis.Redis]:
        path = self.servers.url(name).removeprefix("unix://")
        with redis.Redis(unix_socket_path=path, socket_timeout=WAIT_S) as client:
            yield client

    # --- what befalls it --------------------------------------------------------------------------

    def kill(self, which: Which) -> None:
        """The guardian starts it again after a moment, empty."""
        for name in _names(which):
            with contextlib.suppress(ProcessLookupError):  # it is on its way back already
                os.kill(self.servers.pid(name), signal.SIGKILL)

    def take_away(self, which: Which) -> None:
        """Killed, and nobody starts it again until mend()."""
        self._stop_process(self._guardian())
        self.kill(which)

    def freeze(self, which: Which) -> None:
        for name in _names(which):
            self._stop_process(self.servers.pid(name))

    def fill(self, which: Which) -> None:
        """Write until a server refuses the next kilobyte, as one does that reached maxmemory."""
        for name in _names(which):
            self._full.add(name)
            with self.client(name) as client:
                client.config_set("maxmemory", _used(client) + HEADROOM)
                _write_junk(client)
                # What expires or disconnects now makes no room.
                client.config_set("maxmemory", _used(client) - HEADROOM // 2)

    def mend(self) -> None:
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen.clear()
        self.await_up()
        for name in sorted(self._full):
            with self.client(name) as client:
                client.config_set("maxmemory", 256 * MIB)
                keys = list(client.scan_iter(f"{JUNK}:*", count=1000))
                if keys:
                    client.delete(*keys)
        self._full.clear()

    def await_up(self) -> None:
        until = time.monotonic() + WAIT_S
        for name in _names("both"):
            while not self._answers(name):
                assert time.monotonic() < until, f"redis {name} did not come back"
                time.sleep(0.02)

    # --- what is in it ----------------------------------------------------------------------------

    def immortal_keys(self) -> list[str]:
        """Keys that would stay for ever."""
        found = []
        for name in _names("both"):
            with self.client(name) as client:
                keys = list(client.scan_iter(count=1000))
                pipeline = client.pipeline(transaction=False)
                for key in keys:
                    pipeline.pttl(key)
                lives = zip(keys, pipeline.execute(), strict=True)
                found += [f"{name}: {key.decode()}" for key, ttl in lives if ttl == -1]
        return found

    def _answers(self, name: str) -> bool:
        try:
            with self.client(name) as client:
                return bool(client.ping())
        except (redis.RedisError, OSError):
            return False

    def _guardian(self) -> int:
        return int(psutil.Process(self.servers.pid("index")).ppid())

    def _stop_process(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(pid)


def which(word: str) -> Which:
    """The word, checked."""
    known: tuple[Which, ...] = get_args(Which)
    return known[known.index(word)]


def _names(which: Which) -> tuple[str, ...]:
    return {"index": ("index",), "data": ("data0",), "both": ("index", "data0")}[which]


def _used(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def _write_junk(client: redis.Redis) -> None:
    number, size = 0, MIB
    while size >= 64:
        try:
            client.set(f"{JUNK}:{number}", b"x" * size)
            number += 1
        except redis.ResponseError:  # OOM: smaller pieces still fit
            size //= 4
