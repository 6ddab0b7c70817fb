"""The peers of `make peers`, as sides of the comparison: each pass runs in their environment.

In: a server's port, and the peers that were asked for by name. Out: a side per peer. Without their
environment there is none, which is an error if one was asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support.kv.contenders import Act
from benchmarks.support.rivals import PEERS, takes_part

WORKER = Path(__file__).with_name("peer_worker.py")
PYTHON = PEERS / "python"
NAMES = ("lmcache", "redis-py")
END_S = 10.0


class Worker:
    """One process for all peers; it is idle while others have their turn."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [str(PYTHON), str(WORKER), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
            text=True,
        )
        self.peers: dict[str, str] = self._answer()["peers"]

    def ask(self, order: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"the peers' process ended; run {PYTHON} {WORKER} PORT by hand to see why"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(END_S)


class Peer:
    """One of them, values of one size."""

    def __init__(self, worker: Worker, key: str, kib: int, values: int) -> None:
        self.name = worker.peers[key]
        self._worker = worker
        self._order = {"peer": key, "kib": kib, "values": values}

    def seconds(self, act: Act) -> float:
        return self._worker.ask({**self._order, "act": act})

    def close(self) -> None:
        """The process serves other sizes too."""


@contextmanager
def peers(port: int, asked: Sequence[str] | None = None) -> Iterator[Worker | None]:
    """The process of the peers; None without any. `asked` are the names of those to compare; None:
    all that are there."""
    wanted = NAMES if asked is None else tuple(asked)
    there = PYTHON.exists()
    if not [
        name for name in wanted if takes_part(name, PEERS, there=there, asked=asked is not None)
    ]:
        yield None
        return
    worker = Worker(port)
    try:
        yield worker
    finally:
        worker.close()
