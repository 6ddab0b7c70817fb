"""The store of a cluster, with faults that a test injects.

In: "index", "data" (every data server), "both", or one data server's name. Out: servers that die
(and restart empty by their guardian), stay down, freeze, or are full; and, with links, links that
are slow, stalled, cut or lossy. mend() ends all faults.
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
# The free memory that a server gets before it is filled. Its own buffers take a part of it.
HEADROOM = MIB
# A simulated chunk of 8 KiB takes 1/8 s on a slow link. A lossy link has a mishap in about every
# second chunk.
SLOW_BYTES_PER_S, LOSSY_BYTES = 64 << 10, 16 << 10


class FaultyStore:
    """An EmbeddedStore, of this `binary` or the default one. With `links`, nodes and routers reach
    each server through a LinkProxy, otherwise through its socket."""

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
        self._full: dict[str, int] = {}  # full server -> its maxmemory before that

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
        """Return the names of the selected servers."""
        groups = {"index": ("index",), "data": self.data, "both": ("index", *self.data)}
        names = groups.get(which, (which,))
        assert set(names) <= {"index", *self.data}, f"{which}: this store has {self.data}"
        return names

    def url(self, name: str) -> str:
        """The URL of a server for nodes and routers."""
        return self.links[name].url if self.links else self.servers.url(name)

    def flags(self) -> list[str]:
        data = ",".join(self.url(name) for name in self.data)
        return [f"--redis-index={self.url('index')}", f"--redis-data={data}"]

    @contextlib.contextmanager
    def client(self, name: str) -> Iterator[redis.Redis]:
        path = self.servers.url(name).removeprefix("unix://")
        with redis.Redis(unix_socket_path=path, socket_timeout=WAIT_S, driver_info=None) as client:
            yield client

    # --- faults -----------------------------------------------------------------------------------

    def kill(self, which: Which) -> None:
        """Kill servers. Their guardian restarts them after a moment, empty."""
        for name in self.names(which):
            with contextlib.suppress(ProcessLookupError):  # it is being restarted already
                os.kill(self.servers.pid(name), signal.SIGKILL)

    def take_away(self, which: Which) -> None:
        """Kill servers, and prevent their restart until mend()."""
        self._stop_process(self._guardian())
        self.kill(which)

    def freeze(self, which: Which) -> None:
        for name in self.names(which):
            self._stop_process(self.servers.pid(name))

    def fill(self, which: Which) -> None:
        """Write until the servers refuse writes, because they have reached maxmemory."""
        for name in self.names(which):
            with self.client(name) as client:
                self._full.setdefault(name, int(client.config_get("maxmemory")["maxmemory"] or 0))
                client.config_set("maxmemory", _used(client) + HEADROOM)
                _write_junk(client)
                # Keys that expire and clients that disconnect must not make room.
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
        deadline = time.monotonic() + WAIT_S
        for name in self.names("both"):
            while not self._answers(name):
                assert time.monotonic() < deadline, f"redis {name} did not restart"
                time.sleep(0.02)

    # --- contents ---------------------------------------------------------------------------------

    def immortal_keys(self) -> list[str]:
        """Return the keys without a TTL."""
        immortal = []
        for name in self.names("both"):
            with self.client(name) as client:
                keys = list(client.scan_iter(count=1000))
                pipeline = client.pipeline(transaction=False)
                for key in keys:
                    pipeline.pttl(key)
                ttls = zip(keys, pipeline.execute(), strict=True)
                immortal += [f"{name}: {key.decode()}" for key, ttl in ttls if ttl == -1]
        return immortal

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


def which(name: str) -> Which:
    """Return the name as a Which; raise ValueError if it is not one."""
    known: tuple[Which, ...] = get_args(Which)
    return known[known.index(name)]


def _used(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def _write_junk(client: redis.Redis) -> None:
    number, size = 0, MIB
    while size >= 64:
        try:
            client.set(f"{JUNK}:{number}", b"x" * size)
            number += 1
        except redis.ResponseError:  # OOM: a smaller value may still fit
            size //= 4
