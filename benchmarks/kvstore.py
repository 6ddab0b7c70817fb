"""Put and get of KV-sized values: baton_kvstore's DataPlane beside redis-py, in the same run.

    python benchmarks/kvstore.py [--url URL] [--rounds 7] [--values 32]

Both write and read the same number of values on the same server (an embedded one unless --url names
another), interleaved round by round, after one warm-up round each: fresh keys pay page faults that
overwritten ones do not. redis-py runs in as many threads as the data plane, each with a connection
of its own; it neither checksums nor writes into a given buffer, which the data plane does. Printed:
median GB/s of the rounds, payload bytes over wall time, with the quartiles, and the ratio.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata

import redis

from baton_kvstore.data import DataPlane
from baton_kvstore.embedded import EmbeddedStore
from baton_kvstore.operations import GetResult, PutResult
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.store import Marker

MIB = 1 << 20
PATIENCE_S = 120.0
Rates = list[float]


def layout_of(mib: int) -> KVLayout:
    """A layout whose chunk is `mib` MiB: 16 tokens x 32 layers x 8 heads x 64 in bfloat16 is 1."""
    return KVLayout(
        num_layers=32,
        num_kv_heads=8,
        head_dim=64,
        block_size=16,
        dtype="bfloat16",
        chunk_blocks=mib,
    )


class Countdown:
    """Waits for a number of calls."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()

    def tick(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._done.set()

    def wait(self) -> None:
        if not self._done.wait(PATIENCE_S):
            raise SystemExit("a transfer never settled")


class OurSide:
    """DataPlane: source and destination are one pool of bytes, as in a node."""

    def __init__(self, url: str, mib: int, names: Sequence[BlockHash], threads: int) -> None:
        layout = layout_of(mib)
        self._names = names
        self._tokens = layout.chunk_tokens
        self._pool = bytearray(os.urandom(layout.chunk_bytes)) * 2
        self._source = memoryview(self._pool)[: layout.chunk_bytes]
        self._target = memoryview(self._pool)[layout.chunk_bytes :]
        self._markers: dict[BlockHash, Marker] = {}
        self._plane = DataPlane(
            [url],
            layout,
            Fingerprint("b" * 32),
            Epoch("bench"),
            threads_per_instance=threads,
        )
        self._plane.start()

    def put(self) -> None:
        countdown = Countdown(len(self._names))

        def fill(view: memoryview) -> None:
            view[:] = self._source

        def done(result: PutResult) -> None:
            if result.marker is None:
                raise SystemExit(f"put failed: {result.reason}")
            self._markers[result.hash] = result.marker
            countdown.tick()

        for depth, name in enumerate(self._names):
            self._plane.submit_put(name, self._tokens, depth, fill, lambda: None, done)
        countdown.wait()

    def get(self) -> None:
        countdown = Countdown(len(self._names))
        failures: list[str] = []

        def sink(view: memoryview) -> None:
            self._target[:] = view

        def done(result: GetResult) -> None:
            failures.append(result.reason)
            countdown.tick()

        for depth, name in enumerate(self._names):
            self._plane.submit_get(name, self._markers[name], depth, sink, done)
        countdown.wait()
        if any(failures):
            raise SystemExit(f"get failed: {next(filter(None, failures))}")

    def close(self) -> None:
        self._plane.close()


class TheirSide:
    """redis-py, one client per thread; each value got is dropped at once."""

    def __init__(self, url: str, mib: int, names: Sequence[BlockHash], threads: int) -> None:
        self._keys = [b"redis-py:" + name for name in names]
        self._value = os.urandom(mib * MIB)
        self._clients = [redis.Redis.from_url(url, protocol=2) for _ in range(threads)]
        self._threads = ThreadPoolExecutor(threads)

    def put(self) -> None:
        self._each(lambda client, key: client.set(key, self._value, px=3_600_000))

    def get(self) -> None:
        self._each(lambda client, key: client.getex(key, px=3_600_000))

    def _each(self, act: Callable[[redis.Redis, bytes], object]) -> None:
        def lane(number: int) -> None:
            for key in self._keys[number :: len(self._clients)]:
                if not act(self._clients[number], key):
                    raise SystemExit("redis-py got nothing")

        list(self._threads.map(lane, range(len(self._clients))))

    def close(self) -> None:
        self._threads.shutdown()
        for client in self._clients:
            client.close()


def timed(act: Callable[[], None], size: int) -> float:
    """GB/s."""
    started = time.perf_counter()
    act()
    return size / (time.perf_counter() - started) / 1e9


def show(word: str, mib: int, ours: Rates, theirs: Rates) -> None:
    def text(rates: Rates) -> str:
        low, middle, high = statistics.quantiles(rates, n=4)
        return f"{middle:5.2f} [{low:.2f}-{high:.2f}]"

    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"{mib:>3} MiB {word}   {text(ours):>18}   {text(theirs):>18}   {ratio:5.2f}x")


def compare(url: str, mib: int, arguments: argparse.Namespace) -> None:
    count = arguments.values
    names = [BlockHash(hashlib.sha256(b"%d" % n).digest()[:16]) for n in range(count)]
    sides = [side(url, mib, names, arguments.threads) for side in (OurSide, TheirSide)]
    rates: dict[str, tuple[Rates, Rates]] = {"put": ([], []), "get": ([], [])}
    for turn in range(arguments.rounds + 1):
        for number, side in enumerate(sides):
            for word, act in (("put", side.put), ("get", side.get)):
                rate = timed(act, count * mib * MIB)
                if turn:  # the first one warms up
                    rates[word][number].append(rate)
    for word, (ours, theirs) in rates.items():
        show(word, mib, ours, theirs)
    for side in sides:
        side.close()


@contextmanager
def server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with EmbeddedStore(2 << 30) as store:
        yield store.data_urls[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", help="an unused Redis; default: an embedded one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--values", type=int, default=32, help="values per round")
    parser.add_argument("--threads", type=int, default=2, help="on both sides")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 8 values")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.values = 3, 8
    try:
        parsing = f"with hiredis {metadata.version('hiredis')}"
    except metadata.PackageNotFoundError:
        parsing = "without hiredis"
    with server(arguments.url) as url, redis.Redis.from_url(url, protocol=2) as client:
        version = client.info("server")["redis_version"]
        print(f"server {version} at {url.split('@')[-1]}, {os.cpu_count()} CPUs")
        print(f"redis-py {redis.__version__} {parsing}, {arguments.threads} threads on both sides")
        print(f"{'':11}   {'DataPlane GB/s':>18}   {'redis-py GB/s':>18}   ratio")
        for mib in (1, 2, 4):
            compare(url, mib, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
