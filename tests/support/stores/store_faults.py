"""The store of a cluster, and what can befall it.

In: "index", "data" (every data server), "both", or one data server's name. Out: servers that die
(and come back empty, as their guardian starts them again), stay away, freeze, or have no byte left;
and, where each stands behind a link, links that are slow, stalled, cut or lossy. mend() undoes all
of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import psutil
import redis

from baton_kvstore.embedded.servers import EmbeddedStore
from tests.support.wires.link_proxy import LinkProxy
from tests.support.wires.wire import WireLoop

Which = Literal["index", "data", "both", "data0", "data1", "data2"]
WAIT_S = 120.0
JUNK = "junk"
MIB = 1 << 20
# Left over what is used when a server is to become full; its own buffers take part of it.
HEADROOM = MIB
# A simulated chunk of 8 KiB takes an eighth of a second on a slow link; a lossy one has a mishap
# with about every second.
SLOW_BYTES_PER_S, LOSSY_BYTES = 64 << 10, 16 << 10


class FaultyStore:
    """An EmbeddedStore, of the `binary` given or the one that users have. With `links` nodes and
    router reach each server over a link that can be hit; without they use its socket."""

    def __init__(
        self,
        memory: int = 256 * MIB,
        *,
        data_servers: int = 1,
        links: bool = False,
        binary: Path | None = None,
    ) -> None:
        self.servers = EmbeddedStore(memory, data_instances=data_servers, binary=binary)
        self.data = tuple(f"data{number}" for number in range(data_servers))
        self.links: dict[str, LinkProxy] = {}
        self._loop = WireLoop() if links else None
        self._frozen: set[int] = set()
        self._full: dict[str, int] = {}  # and the maxmemory that it had before

    def start(self) -> None:
        self.servers.start()
        if self._loop is not None:
            for name in self.names("both"):
                self.links[name] = LinkProxy(self._loop, self.servers.url(name))

    def stop(self) -> None:
        self.mend()
        for link in self.links.values():
            link.close()
        if self._loop is not None:
            self._loop.close()
        self.servers.stop()

    def names(self, which: Which) -> tuple[str, ...]:
        """The servers meant."""
        groups = {"index": ("index",), "data": self.data, "both": ("index", *self.data)}
        names = groups.get(which, (which,))
        assert set(names) <= {"index", *self.data}, f"{which}: this store has {self.data}"
        return names

    def url(self, name: str) -> str:
        """Where nodes and router reach a server."""
        return self.links[name].url if self.links else self.servers.url(name)

    def flags(self) -> list[str]:
        data = ",".join(self.url(name) for name in self.data)
        return [f"--redis-index={self.url('index')}", f"--redis-data={data}"]

    @contextlib.contextmanager
    def client(self, name: str) -> Iterator[redis.Redis]:
        path = self.servers.url(name).removeprefix("unix://")
        with redis.Redis(unix_socket_path=path, socket_timeout=WAIT_S) as client:
            yield client

    # --- what befalls it --------------------------------------------------------------------------

    def kill(self, which: Which) -> None:
        """The guardian starts it again after a moment, empty."""
        for name in self.names(which):
            with contextlib.suppress(ProcessLookupError):  # it is on its way back already
                os.kill(self.servers.pid(name), signal.SIGKILL)

    def take_away(self, which: Which) -> None:
        """Killed, and nobody starts it again until mend()."""
        self._stop_process(self._guardian())
        self.kill(which)

    def freeze(self, which: Which) -> None:
        for name in self.names(which):
            self._stop_process(self.servers.pid(name))

    def fill(self, which: Which) -> None:
        """Write until a server refuses the next kilobyte, as one does that reached maxmemory."""
        for name in self.names(which):
            with self.client(name) as client:
                self._full.setdefault(name, int(client.config_get("maxmemory")["maxmemory"] or 0))
                client.config_set("maxmemory", _used(client) + HEADROOM)
                _write_junk(client)
                # What expires or disconnects now makes no room.
                client.config_set("maxmemory", _used(client) - HEADROOM // 2)

    def slow_link(self, which: Which) -> None:
        for link in self._links(which):
            link.slow(SLOW_BYTES_PER_S)

    def stall_link(self, which: Which) -> None:
        for link in self._links(which):
            link.hold()

    def cut_link(self, which: Which) -> None:
        for link in self._links(which):
            link.refuse()

    def lose_on_link(self, which: Which) -> None:
        for link in self._links(which):
            link.lossy(LOSSY_BYTES, "cut", "stall", seed=which)

    def mend(self) -> None:
        for link in self.links.values():
            link.mend()
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen.clear()
        self.await_up()
        for name, maxmemory in sorted(self._full.items()):
            with self.client(name) as client:
                client.config_set("maxmemory", maxmemory)
                keys = list(client.scan_iter(f"{JUNK}:*", count=1000))
                if keys:
                    client.delete(*keys)
        self._full.clear()

    def await_up(self) -> None:
        until = time.monotonic() + WAIT_S
        for name in self.names("both"):
            while not self._answers(name):
                assert time.monotonic() < until, f"redis {name} did not come back"
                time.sleep(0.02)

    # --- what is in it ----------------------------------------------------------------------------

    def immortal_keys(self) -> list[str]:
        """Keys that would stay for ever."""
        found = []
        for name in self.names("both"):
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

    def _links(self, which: Which) -> list[LinkProxy]:
        return [self.links[name] for name in self.names(which)]

    def _guardian(self) -> int:
        return int(psutil.Process(self.servers.pid("index")).ppid())

    def _stop_process(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(pid)


def which(word: str) -> Which:
    """The word, checked."""
    known: tuple[Which, ...] = get_args(Which)
    return known[known.index(word)]


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
