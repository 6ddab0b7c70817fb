"""Who puts and gets values of one size in this process: the data plane and two measures of it.

    Plane     baton_kvstore.DataPlane, as in a node: values, with a checksum, are sent from the
              blocks of a pool and received into them; or `staged`: copied out of blocks and into
              them, as a node does whose pool no socket can reach (a GPU's)
    Bare      the same commands on the same number of connections and threads, and nothing else: no
              checksum, no copy, each value received over the last
    RedisPy   redis-py, a client per thread; a value got is copied to where it belongs

In: addresses, names. Out: seconds of one pass over all names.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import redis

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.transfers import GetResult, PutResult
from baton_kvstore.data.tuning import Tuning
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.store import Marker

KIB = 1 << 10
PATIENCE_S = 120.0
LIFETIME_MS = 3_600_000
Act = Literal["put", "get"]


class Side(Protocol):
    """`name` as the table has it."""

    name: str

    def seconds(self, act: Act) -> float: ...

    def close(self) -> None: ...


def layout_of(kib: int) -> KVLayout:
    """A layout whose chunk has this size, in blocks of 1 MiB if it is larger: 16 tokens x 32 layers
    x 8 heads x 64 in bfloat16. A smaller one is a block with fewer layers, 32 KiB each."""
    blocks = max(1, kib // 1024)
    layout = KVLayout(
        num_layers=32 * kib // 1024 // blocks,
        num_kv_heads=8,
        head_dim=64,
        block_size=16,
        dtype="bfloat16",
        chunk_blocks=blocks,
    )
    if layout.chunk_bytes != kib * KIB:
        raise SystemExit(f"{kib} KiB are no multiple of 32 KiB, or of 1 MiB if more than that")
    return layout


def blocks_of(layout: KVLayout) -> list[memoryview]:
    """Of a chunk, as they lie in a pool, in use: its memory is there."""
    pool, size = memoryview(bytearray(os.urandom(layout.chunk_bytes))), layout.block_bytes
    return [pool[begin : begin + size] for begin in range(0, len(pool), size)]


class Countdown:
    """Waits for a number of calls, of which none may bring a reason."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._reasons: list[str] = []

    def tick(self, reason: str) -> None:
        with self._lock:
            self._reasons += [reason] if reason else []
            self._left -= 1
            if not self._left:
                self._done.set()

    def wait(self) -> None:
        if not self._done.wait(PATIENCE_S):
            raise SystemExit("a transfer did not end")
        if self._reasons:
            raise SystemExit(f"a transfer failed: {self._reasons[0]}")


class Plane:
    """Through the whole library. All values are of one chunk, and go into another."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        kib: int,
        names: Sequence[BlockHash],
        threads: int,
        *,
        staged: bool = False,
    ) -> None:
        self.name = name
        layout = layout_of(kib)
        self._names = names
        self._tokens = layout.chunk_tokens
        self._staged = staged
        self._source, self._target = blocks_of(layout), blocks_of(layout)
        self._markers: dict[BlockHash, Marker] = {}
        self._plane = DataPlane(
            urls,
            layout,
            Fingerprint("b" * 32),
            Epoch("bench"),
            settings="apply",
            tuning=Tuning(threads_per_instance=threads),
        )
        self._plane.start()
        if not self._plane.wait_connected(PATIENCE_S):
            raise SystemExit(f"no connection to {', '.join(urls)}")

    def seconds(self, act: Act) -> float:
        began = time.perf_counter()
        countdown = Countdown(len(self._names))
        if act == "put":
            self._put(countdown)
        else:
            self._get(countdown)
        countdown.wait()
        return time.perf_counter() - began

    def _put(self, countdown: Countdown) -> None:
        def fill(view: memoryview, shard: int) -> None:
            for part, block in zip(_parts(view, self._source), self._source, strict=True):
                np.copyto(part, block)  # other threads run meanwhile

        def copied() -> None:
            """The source is one for all."""

        def done(result: PutResult) -> None:
            if result.marker is not None:
                self._markers[result.hash] = result.marker
            countdown.tick(result.reason)

        direct = None if self._staged else self._source
        for depth, name in enumerate(self._names):
            self._plane.submit_put(name, self._tokens, depth, fill, copied, done, direct=direct)

    def _get(self, countdown: Countdown) -> None:
        def sink(view: memoryview, shard: int) -> None:
            for part, block in zip(_parts(view, self._target), self._target, strict=True):
                np.copyto(np.frombuffer(block, np.uint8), part)

        def done(result: GetResult) -> None:
            countdown.tick(result.reason)

        direct = None if self._staged else self._target
        for depth, name in enumerate(self._names):
            marker = self._markers[name]
            self._plane.submit_get(name, marker, depth, sink, done, direct=direct)

    def close(self) -> None:
        self._plane.close()


def _parts(view: memoryview, blocks: Sequence[memoryview]) -> Sequence[npt.NDArray[np.uint8]]:
    """One per block."""
    return np.frombuffer(view, np.uint8).reshape(len(blocks), -1)  # type: ignore[return-value]


class Lanes:
    """One thread and one connection for every `threads`-th name."""

    def __init__(self, names: Sequence[BlockHash], prefix: bytes, threads: int) -> None:
        keys = [prefix + name for name in names]
        self._keys = [keys[number::threads] for number in range(threads)]
        self._threads = ThreadPoolExecutor(threads)

    def seconds(self, act: Callable[[int, bytes], None]) -> float:
        def lane(number: int) -> None:
            for key in self._keys[number]:
                act(number, key)

        began = time.perf_counter()
        list(self._threads.map(lane, range(len(self._keys))))
        return time.perf_counter() - began

    def close(self) -> None:
        self._threads.shutdown()


class Bare:
    """Sockets, and the bytes of the protocol."""

    def __init__(
        self, name: str, url: str, kib: int, names: Sequence[BlockHash], threads: int
    ) -> None:
        self.name = name
        self._lanes = Lanes(names, b"bare:", threads)
        self._value = memoryview(os.urandom(kib * KIB))
        self._head = b"$%d\r\n" % len(self._value)
        room = len(self._head) + len(self._value) + 2
        self._buffers = [memoryview(bytearray(room)) for _ in range(threads)]
        self._links = [_connect(url) for _ in range(threads)]

    def seconds(self, act: Act) -> float:
        return self._lanes.seconds(self._put if act == "put" else self._get)

    def _put(self, lane: int, key: bytes) -> None:
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n%b" % (len(key), key, self._head)
        tail = b"\r\n$2\r\nPX\r\n$7\r\n%d\r\n" % LIFETIME_MS
        link = self._links[lane]
        parts = [memoryview(head), self._value, memoryview(tail)]
        while parts:
            sent = link.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]
        if link.recv(16) != b"+OK\r\n":
            raise SystemExit("SET was refused")

    def _get(self, lane: int, key: bytes) -> None:
        link, into = self._links[lane], self._buffers[lane]
        tail = b"$2\r\nPX\r\n$7\r\n%d\r\n" % LIFETIME_MS
        link.sendall(b"*4\r\n$5\r\nGETEX\r\n$%d\r\n%b\r\n%b" % (len(key), key, tail))
        have = 0
        while have < len(into):
            have += link.recv_into(into[have:], 0, socket.MSG_WAITALL)
        if into[: len(self._head)] != self._head:
            raise SystemExit("GETEX returned other bytes")

    def close(self) -> None:
        self._lanes.close()
        for link in self._links:
            link.close()


class RedisPy:
    """The client library that everybody has."""

    def __init__(
        self, name: str, url: str, kib: int, names: Sequence[BlockHash], threads: int
    ) -> None:
        self.name = name
        self._lanes = Lanes(names, b"redis-py:", threads)
        self._value = os.urandom(kib * KIB)
        self._targets = [memoryview(bytearray(kib * KIB)) for _ in range(threads)]
        self._clients = [redis.Redis.from_url(url, protocol=2) for _ in range(threads)]

    def seconds(self, act: Act) -> float:
        return self._lanes.seconds(self._put if act == "put" else self._get)

    def _put(self, lane: int, key: bytes) -> None:
        self._clients[lane].set(key, self._value, px=LIFETIME_MS)

    def _get(self, lane: int, key: bytes) -> None:
        value = self._clients[lane].getex(key, px=LIFETIME_MS)
        if not isinstance(value, bytes):
            raise SystemExit("redis-py returned no value")
        self._targets[lane][:] = value

    def close(self) -> None:
        self._lanes.close()
        for client in self._clients:
            client.close()


def _connect(url: str) -> socket.socket:
    endpoint = parse_endpoint(url)
    if endpoint.kind == "unix":
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(endpoint.path)
        return link
    link = socket.create_connection((endpoint.host, endpoint.port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
