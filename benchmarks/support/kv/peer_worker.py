"""LMCache's and redis-py's clients in the peers' own environment, driven through a pipe.

    .venv-peers/bin/python benchmarks/support/kv/peer_worker.py PORT

In, a line of JSON each: {"peer", "act", "kib", "values"}. Out: {"seconds"} of that pass; first of
all {"peers": {name: version}}. Imports nothing of ours. Each pass is timed here, so the pipe costs
nothing. One connection each, one value after the other, received over the last.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import time
from importlib.metadata import version
from typing import Any

HOST = "127.0.0.1"
LIFETIME_MS = 3_600_000
STILL_S = 60.0


class LMCache:
    """The C++ client, one worker."""

    def __init__(self, port: int) -> None:
        module = importlib.import_module("lmcache.lmcache_redis")
        self._client: Any = module.LMCacheRedisClient(HOST, port, 1)
        self._events = select.poll()
        self._fd = int(self._client.event_fd())
        self._events.register(self._fd, select.POLLIN)

    def put(self, key: str, value: memoryview) -> None:
        self._settle(self._client.submit_batch_set([key], [value]))

    def get(self, key: str, into: memoryview) -> None:
        self._settle(self._client.submit_batch_get([key], [into]))

    def _settle(self, ticket: int) -> None:
        while True:
            for found, ok, error, _ in self._client.drain_completions():
                if found != ticket or not ok:
                    raise SystemExit(f"lmcache: {error}")
                return
            if not self._events.poll(STILL_S * 1e3):
                raise SystemExit("lmcache: no answer")


class RedisPy:
    """redis-py as this environment has it: with hiredis."""

    def __init__(self, port: int) -> None:
        self._client: Any = importlib.import_module("redis").Redis(HOST, port, protocol=2)

    def put(self, key: str, value: memoryview) -> None:
        self._client.set(key, value, px=LIFETIME_MS)

    def get(self, key: str, into: memoryview) -> None:
        into[:] = self._client.getex(key, px=LIFETIME_MS)


def run(peer: LMCache | RedisPy, name: str, order: dict[str, Any]) -> float:
    buffer = memoryview(bytearray(os.urandom(order["kib"] << 10)))
    act = peer.put if order["act"] == "put" else peer.get
    keys = [f"{name}:{order['kib']}:{number}" for number in range(order["values"])]
    began = time.perf_counter()
    for key in keys:
        act(key, buffer)
    return time.perf_counter() - began


def main() -> None:
    # What libraries print goes to stderr: stdout is the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    port = int(sys.argv[1])
    peers: dict[str, LMCache | RedisPy] = {"lmcache": LMCache(port), "redis-py": RedisPy(port)}
    versions = {
        "lmcache": f"LMCache {version('lmcache')}, C++ client, 1 worker",
        "redis-py": f"redis-py {version('redis')} + hiredis {version('hiredis')}, 1 connection",
    }
    answers.write(json.dumps({"peers": versions}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        seconds = run(peers[order["peer"]], order["peer"], order)
        answers.write(json.dumps({"seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
