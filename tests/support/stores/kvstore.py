"""Shared parts of the store's tests: a small layout, records, and transfers with waits."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.rate_meter import RateMeter
from baton_kvstore.data.shared import Shared
from baton_kvstore.data.staging_pool import StagingPool
from baton_kvstore.data.transfers import GetResult, PutResult
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedServers, EmbeddedStore
from baton_kvstore.errors import StoreError
from baton_kvstore.index.markers import Index
from baton_kvstore.settings import check_reachable
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId
from baton_protocol.layout import KVLayout
from baton_protocol.store import Marker, NodeReport, Priority

FINGERPRINT = Fingerprint("0123456789abcdef0123456789abcdef")
EPOCH = Epoch("epoch-1")
PATIENCE_S = 120.0
# For planes whose servers are healthy: a busy machine must not cause timeouts.
PATIENT = Tuning(deadline_base_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)


def patient_index(url: str, pool: str) -> Index:
    """An index client with a long timeout, which a busy machine does not exceed."""
    return Index(url, pool, timeout_s=PATIENCE_S)


# 64 KiB per chunk: large enough for many packets, small enough for thousands of chunks.
LAYOUT = KVLayout(
    num_layers=4, num_kv_heads=4, head_dim=32, block_size=16, dtype="float32", chunk_blocks=1
)


def chunk_name(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(f"chunk {number}".encode()).digest()[:16])


def payload_of(chunk: BlockHash, layout: KVLayout = LAYOUT) -> bytes:
    """Random bytes that are unique to the chunk."""
    return random.Random(chunk).randbytes(layout.chunk_bytes)


def node_report(node: str = "node-1", epoch: str = "epoch-1") -> NodeReport:
    return NodeReport(
        node=NodeId(node),
        role="decode",
        address="http://127.0.0.1:9000",
        pid=1,
        epoch=Epoch(epoch),
        state="ready",
        fingerprint=FINGERPRINT,
        layout=LAYOUT,
        model="demo",
        engine="sim",
        max_model_len=4096,
        vocab_size=259,
        artifacts={},
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.005)


def plain_client(url: str) -> redis.Redis:
    """A redis-py client, independent of our own, to inspect and to break a server. It does not name
    itself: a tenth of a KV fault's time went into reading redis-py's version for that."""
    endpoint = parse_endpoint(url)
    return redis.Redis(unix_socket_path=endpoint.path, db=endpoint.db, protocol=2, driver_info=None)


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Stop the processes (SIGSTOP) for the duration of the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def held_down(servers: EmbeddedServers, name: str) -> Iterator[None]:
    """Kill a server, and let its guardian restart it, empty, only after the block."""
    import psutil  # machines for `make gpu`, which use other parts of this file, lack it

    victim = psutil.Process(servers.pid(name))
    with frozen(victim.ppid()):
        victim.kill()
        # A zombie: its frozen guardian cannot reap it.
        wait_until(lambda: victim.status() == psutil.STATUS_ZOMBIE, "the server to end")
        yield


def immortal_keys(url: str) -> list[bytes]:
    """The keys without a TTL."""
    with plain_client(url) as client:
        return [key for key in client.scan_iter() if client.pttl(key) == -1]


class SharedStore:
    """A store that many tests use in turn; each test gets it in the state of a new one."""

    def __init__(self, store_memory: int, data_instances: int = 1) -> None:
        self._size = (store_memory, data_instances)
        self._store: EmbeddedStore | None = None
        self._started: list[object] = []

    def as_new(self) -> EmbeddedStore:
        """Empty the store, or restart it if a test ended a server or changed its settings."""
        if self._store is None or _state(self._store) != self._started:
            self.close()
            memory, instances = self._size
            self._store = EmbeddedStore(memory, data_instances=instances)
            self._store.start()
            self._started = _state(self._store)
        for url in _urls(self._store):
            with plain_client(url) as client:
                client.flushall()
                client.config_resetstat()
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.stop()


def _urls(store: EmbeddedStore) -> tuple[str, ...]:
    return (store.index_url, *store.data_urls)


def _state(store: EmbeddedStore) -> list[object]:
    """The servers' run ids and settings; empty if one is unreachable."""
    state: list[object] = []
    try:
        for url in _urls(store):
            run_id = check_reachable(url).run_id
            with plain_client(url) as client:
                state.append((run_id, client.config_get("*"), client.acl_list()))
    except StoreError:
        return []
    return [store.is_alive, *state]


class Transfers:
    """Puts and gets of a data plane that wait for their results."""

    def __init__(self, plane: DataPlane, layout: KVLayout = LAYOUT) -> None:
        self.plane = plane
        self.layout = layout
        self.copied: list[BlockHash] = []
        self._changed = threading.Condition()
        self._settled = 0

    def put_later(
        self,
        chunk: BlockHash,
        payload: bytes,
        depth: int = 0,
        priority: Priority = Priority.PREFIX,
        kept_until: int = 0,
    ) -> Callable[[], PutResult]:
        results: list[PutResult] = []
        size = self.layout.shard_bytes

        def fill(view: memoryview, shard: int) -> None:
            view[:] = payload[shard * size : (shard + 1) * size]

        self.plane.submit_put(
            chunk,
            self.layout.chunk_tokens,
            depth,
            fill,
            lambda: self.copied.append(chunk),
            lambda result: self._settle(results, result),
            priority,
            kept_until=kept_until,
        )
        return lambda: self._wait(results)

    def get_later(
        self,
        chunk: BlockHash,
        marker: Marker,
        depth: int = 0,
        priority: Priority = Priority.PREFIX,
    ) -> Callable[[], tuple[GetResult, bytes]]:
        results: list[GetResult] = []
        received: dict[int, bytes] = {}

        def sink(view: memoryview, shard: int) -> None:
            received[shard] = bytes(view)

        self.plane.submit_get(
            chunk,
            marker,
            depth,
            sink,
            lambda result: self._settle(results, result),
            priority,
        )
        return lambda: (
            self._wait(results),
            b"".join(received[shard] for shard in sorted(received)),
        )

    def put(self, chunk: BlockHash, payload: bytes | None = None, depth: int = 0) -> PutResult:
        data = payload_of(chunk, self.layout) if payload is None else payload
        return self.put_later(chunk, data, depth)()

    def stored(self, chunk: BlockHash, depth: int = 0, kept_until: int = 0) -> Marker:
        """Put the chunk's own payload, and return its marker."""
        payload = payload_of(chunk, self.layout)
        result = self.put_later(chunk, payload, depth, kept_until=kept_until)()
        assert result.marker is not None, result.reason
        return result.marker

    def get(self, chunk: BlockHash, marker: Marker, depth: int = 0) -> tuple[GetResult, bytes]:
        return self.get_later(chunk, marker, depth)()

    def stored_at_last(self, chunk: BlockHash) -> Marker:
        """Put until it succeeds, for short deadlines and servers that just came back."""
        results: list[PutResult] = []

        def put() -> bool:
            results.append(self.put(chunk))
            return results[-1].ok

        wait_until(put, "the chunk to be stored")
        marker = results[-1].marker
        assert marker is not None
        return marker

    def got_at_last(self, chunk: BlockHash, marker: Marker) -> bytes:
        """Get until it succeeds, or until the chunk is gone, which returns no bytes."""
        payloads: list[bytes] = []

        def get() -> bool:
            result, payload = self.get(chunk, marker)
            payloads.append(payload)
            return result.ok or result.gone

        wait_until(get, "the chunk")
        return payloads[-1]

    def _settle(self, results: list[Any], result: PutResult | GetResult) -> None:
        with self._changed:
            assert not results, "settled twice"
            results.append(result)
            self._settled += 1
            self._changed.notify_all()

    def _wait(self, results: list[Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(results), PATIENCE_S), "never settled"
        return results[0]


def shared_by_instances(**tuning: Any) -> Shared:
    """The shared state of a data plane's instances, for values of 100 bytes."""
    return Shared(
        staging=StagingPool(100, 1),
        fingerprint=FINGERPRINT,
        value_bytes=100,
        shards=1,
        puts=RateMeter(),
        gets=RateMeter(),
        tuning=Tuning(**tuning),
        settings=None,
    )
