"""A testbed for faults of the KV exchange: nodes on a store that exchange one prompt's KV.

In: an engine's settings, servers. Out: step loops in this process over real servers, with a
LinkProxy between each node and each server; and the oracle: the ids that an undisturbed engine
generates for the same request, and the bytes of its KV. A node is made at its first use.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType

import msgspec
import numpy as np
import redis

from baton_engine.core.engine_core import EngineCore
from baton_engine.sim.build import SimSettings
from baton_kvstore.index.markers import Index
from baton_kvstore.keys import chunk_key, marker_key
from baton_node.store.address import StoreAddress
from baton_protocol.hashing import chunk_hashes
from baton_protocol.ids import BlockHash, Epoch, NodeId, RequestId
from baton_protocol.link import FirstTokens, PrefillJob, RunJob
from baton_protocol.request import Request
from baton_protocol.store import Marker
from baton_protocol.wire import Codec
from tests.support.kv_faults.kinds import EngineSettings, build_engine
from tests.support.kv_faults.nodes import Pages, RecordingConnector, RecordingNode, Wrap, pages
from tests.support.kv_faults.store_servers import KVServers
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import NOBODY, LoopNode, run_alone
from tests.support.stores.kvstore import PATIENT, patient_index, wait_until
from tests.support.wires.link_proxy import LinkProxy, Mishap
from tests.support.wires.wire import WireLoop

CHUNKS = 12
BLOCK = 16  # tokens, and one block per chunk
TAIL = 9
TARGET = 5  # a chunk in mid-prefix
OTHER = 1  # seed of another prompt
OUTPUTS = 8
SMALL = SimSettings(chunk_blocks=1, num_blocks=96, max_batched_tokens=2 * BLOCK)
# 128 KiB per chunk: a transfer takes time and many packets.
LARGE = replace(SMALL, layers=8, kv_heads=4, head_dim=32)
MACHINE_S = 30.0  # allowance for a busy machine, beyond the fault's own limit
PATIENCE_S = 120.0
TRIES = 3  # to store a prompt without a fault
# Longer than a small command takes: otherwise a node on a busy machine computes stored chunks.
LOOKUP_S = 2.0
PATIENT_LOOKUP_S = 60.0
ROUNDING = 1e-4
TURN_S = 0.001  # interval of checks of a condition while no node has work


def prompt_of(seed: int) -> bytes:
    """Return CHUNKS full chunks and a tail of printable characters."""
    return bytes((i * i * 31 + i * 7 + seed * 13) % 95 + 32 for i in range(CHUNKS * BLOCK + TAIL))


def close(one: bytes, other: bytes) -> bool:
    """Whether two pages have the same float32 numbers up to rounding."""
    first, second = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
    return np.allclose(first, second, rtol=0.0, atol=ROUNDING)


class KVTestbed:
    """Nodes on a store, and a fault. `limit_s` is the number of seconds that the fault may cost in
    addition to MACHINE_S. For nodes made while `patient` is set, a slow server does not count as
    lost."""

    def __init__(
        self,
        settings: EngineSettings,
        servers: KVServers,
        *,
        limit_s: float = 0.0,
    ) -> None:
        self.settings = settings
        self.servers = servers
        self.data = servers.data
        self.limit_s = limit_s
        self.nodes: dict[str, RecordingNode] = {}
        self.injected_at = 0.0
        self.patient = False
        self._loop = WireLoop()
        self._links: dict[tuple[str, str], LinkProxy] = {}
        reference = replace(settings, num_blocks=SMALL.num_blocks)
        self._reference = LoopNode("reference", engine=build_engine(reference))
        self._expected_ids: dict[tuple[tuple[int, ...], str], list[int]] = {}
        self._num_references = 0
        self._replaced_pages: Pages = {}
        self.request = self.make_request("r", 0)
        # Of an engine that is exact up to rounding, pages may differ in the last bits.
        self._exact = self._reference.engine.info.exact == "bitwise"
        self.layout = self._reference.engine.info.layout
        self.fingerprint = self._reference.engine.info.fingerprint

    def __enter__(self) -> KVTestbed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.mend()
        for node in (*self.nodes.values(), self._reference):
            node.close()
        for link in self._links.values():
            link.close()
        self._loop.close()

    # --- nodes and links --------------------------------------------------------------------------

    def node(
        self, name: str, settings: EngineSettings | None = None, wrap: Wrap = lambda memory: memory
    ) -> RecordingNode:
        """Return the named node. Make it if it does not exist, with these `settings`, and with
        `wrap` around the memory that its transfers see."""
        if name not in self.nodes:
            self.nodes[name] = RecordingNode(
                name,
                engine=build_engine(settings or self.settings),
                connect=lambda engine: self._connect(name, engine, wrap),
                fetch="always",
                lookup_wait_s=PATIENT_LOOKUP_S if self.patient else LOOKUP_S,
            )
            plane = self.nodes[name].connector.plane
            wait_until(lambda: all(plane.run_ids), "connections to all data servers")
        return self.nodes[name]

    def mishaps(self) -> Counter[Mishap]:
        """The mishaps of all links."""
        total: Counter[Mishap] = Counter()
        for link in self._links.values():
            total += link.mishaps
        return total

    def drop(self, name: str) -> None:
        """Remove a node, as after a crash."""
        self.nodes.pop(name).close()

    def link(self, node: str, server: str) -> LinkProxy:
        """The link between a node and "index" or "dataN"."""
        if (node, server) not in self._links:
            self._links[node, server] = LinkProxy(self._loop, self.servers.url(server))
        return self._links[node, server]

    def _connect(self, name: str, engine: EngineCore, wrap: Wrap) -> RecordingConnector:
        connector = RecordingConnector(
            StoreAddress(
                index_url=self.link(name, "index").url,
                data_urls=tuple(self.link(name, server).url for server in self.data),
                pool="default",
                node=NodeId(name),
                epoch=Epoch(f"epoch-of-{name}"),
                fingerprint=engine.info.fingerprint,
                settings="check",  # the connector must not change what a test has set
                write_behind_bandwidth=0,
            ),
            wrap(engine.memory),
            patient_index if self.patient else Index,
            PATIENT if self.patient else None,
        )
        connector.start()
        return connector

    # --- servers ----------------------------------------------------------------------------------

    def client(self, server: str) -> redis.Redis:
        return self.servers.redis(server)

    def break_servers(self, act: str, *servers: str) -> None:
        self.servers.break_servers(act, *servers)

    def mend(self) -> None:
        """Repair all servers and links."""
        for link in self._links.values():
            link.mend()
        self.servers.mend()

    # --- stored chunks ----------------------------------------------------------------------------

    def names(self, request: Request | None = None) -> list[BlockHash]:
        """The hashes of the prompt's full chunks."""
        hashes = self._reference.engine.block_hashes(request or self.request)
        return list(chunk_hashes(hashes, self.layout.chunk_blocks))

    def travelling(self, request: Request | None = None) -> range:
        """The indices of the prompt's chunks that a node publishes and another one fetches: if all
        layers have windows, only those that the last window reaches."""
        chunks, layout = len(self.names(request)), self.layout
        return range(0 if layout.num_full_groups else layout.first_complete(chunks), chunks)

    @property
    def target(self) -> int:
        """The chunk in mid-prefix that a fault of one chunk hits."""
        travelling = self.travelling()
        return TARGET if TARGET in travelling else travelling[len(travelling) // 2]

    def is_marked(self, chunk: int) -> bool:
        return self.marked()[chunk - self.travelling().start]

    def marked(self, request: Request | None = None) -> list[bool]:
        """Whether each travelling chunk has a marker."""
        names = self.names(request)[self.travelling(request).start :]
        keys = [marker_key(self.fingerprint, name) for name in names]
        with self.client("index") as client:
            return [value is not None for value in client.mget(keys)]

    def names_of(self, node: str, request: Request) -> list[BlockHash]:
        """Return the hashes that this node computes for the prompt's full chunks."""
        hashes = self.node(node).engine.block_hashes(request)
        return list(chunk_hashes(hashes, self.layout.chunk_blocks))

    def late_keys(self, first: int, *, index: bool) -> set[bytes]:
        """Return the keys of the chunks from `first` on: of their markers if `index` is set, else
        of all shards of their values."""
        names = self.names()[first:]
        if index:
            return {marker_key(self.fingerprint, name) for name in names}
        shards = range(self.layout.kv_shards)
        return {chunk_key(self.fingerprint, name, shard) for name in names for shard in shards}

    def key(self, chunk: int, shard: int = 0, request: Request | None = None) -> bytes:
        return chunk_key(self.fingerprint, self.names(request)[chunk], shard)

    def marker(self, chunk: int) -> Marker:
        with self.client("index") as client:
            raw = client.get(marker_key(self.fingerprint, self.names()[chunk]))
        assert isinstance(raw, bytes)
        return Codec(Marker).decode(raw)

    @contextlib.contextmanager
    def holder(self, key: bytes) -> Iterator[redis.Redis]:
        """Yield a client of the data server that holds this key."""
        for server in self.data:
            with self.client(server) as client:
                if client.exists(key):
                    yield client
                    return
        raise AssertionError(f"no data server holds {key!r}")

    def value(self, key: bytes) -> bytes:
        with self.holder(key) as client:
            value = client.get(key)
            assert isinstance(value, bytes)
            return value

    def overwrite(self, key: bytes, value: bytes) -> None:
        """Replace a value on its server; keep its TTL."""
        with self.holder(key) as client:
            client.set(key, value, keepttl=True)

    # --- requests ---------------------------------------------------------------------------------

    def make_request(self, name: str, seed: int = 0, attempt: int = 1) -> Request:
        return make_request(name, prompt_of(seed), attempt, max_tokens=OUTPUTS)

    def spin(self, condition: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {limit_s:.1f} s for {what}"
            nodes = list(self.nodes.values())
            for node in nodes:
                node.loop.turn()
            if not any(node.engine.has_work() for node in nodes):
                select.select([node.connector for node in nodes], [], [], TURN_S)

    def settle(self) -> None:
        """Turn the loops until no node has work or holds blocks, and check each engine's
        integrity."""
        nodes = self.nodes.values()
        self.spin(lambda: all(n.loop.idle and not n.engine.has_work() for n in nodes), "idleness")
        assert [node.name for node in nodes if not node.freed] == []

    def publish(self, request: Request | None = None, name: str = "p0") -> None:
        """Store all full chunks of the prompt with a prefill node. On a busy machine a node may
        take a slow server for lost and skip chunks, which a new node then puts."""
        request = request or self.request
        for _ in range(TRIES):
            self.try_publish(request, name)
            if all(self.marked(request)):
                return
            self.drop(name)
        raise AssertionError(f"not in the store: {self.marked(request)}")

    def try_publish(self, request: Request, name: str = "p0") -> None:
        """Compute the prompt on a prefill node, which stores the chunks that it can."""
        node = self.node(name)
        node.take(PrefillJob(request, *NOBODY))
        self.spin(lambda: bool(node.tokens(request.id)) and node.loop.idle, "the job's end")

    def spread_request(self) -> Request:
        """Replace the testbed's request by one whose chunks use all data servers, and return it."""
        plane = self.node("p0").connector.plane
        for seed in range(20):
            self.request = self.make_request("r", seed)
            if len({plane.instance_for(name) for name in self.names()}) == len(self.data):
                return self.request
        raise AssertionError("no prompt has chunks on all data servers")

    def on_server(self, server: str) -> list[BlockHash]:
        """Return the hashes of the prompt's chunks whose values this server holds."""
        with self.client(server) as client:
            return [
                name
                for chunk, name in enumerate(self.names())
                if client.exists(*(self.key(chunk, s) for s in range(self.layout.kv_shards)))
            ]

    def run(self, name: str, request: Request | None = None) -> None:
        """Run a whole request on one node, which looks up its prompt in the store."""
        request = request or self.request
        self.node(name).take(RunJob(request))
        self.finish(name, request)

    def hand_off(self, prefill: str, decode: str, request: Request | None = None) -> None:
        """Hand a request off as a router does, to its end."""
        request = request or self.request
        self.begin_hand_off(prefill, decode, request)
        self.end_hand_off(prefill, decode, request)

    def begin_hand_off(self, prefill: str, decode: str, request: Request | None = None) -> None:
        request, node = request or self.request, self.node(decode)
        node.take(RunJob(request, await_first=True))
        self.node(prefill).take(PrefillJob(request, node.name, node.epoch))

    def end_hand_off(self, prefill: str, decode: str, request: Request | None = None) -> None:
        request, node = request or self.request, self.node(prefill)
        self.spin(lambda: bool(node.tokens(request.id)), "the first token", self._left())
        first = (tuple(node.ids(request.id)),)
        self.node(decode).take(FirstTokens(request.id, request.attempt, first))
        self.finish(decode, request, first=len(first[0]))

    def inject(self, fault: Callable[[KVTestbed], None]) -> None:
        """Inject a fault; its time limit starts here."""
        fault(self)
        self.injected_at = time.monotonic()

    def _left(self) -> float:
        if not self.injected_at:
            return PATIENCE_S
        return max(0.0, self.injected_at + self.limit_s + MACHINE_S - time.monotonic())

    # --- the oracle -------------------------------------------------------------------------------

    def finish(self, name: str, request: Request, first: int = 0) -> None:
        """Wait for the request's end. It must have the ids of an undisturbed engine, or a retryable
        error before any token. The prefill node generated the first `first` ids."""
        node = self.node(name)

        def finished() -> bool:
            return bool(self._failed(node, request)) or any(
                token.finish is not None for token in node.tokens(request.id)
            )

        self.spin(finished, f"the end of {request.id}", self._left())
        self.injected_at = 0.0
        ids = node.ids(request.id)
        if failed := self._failed(node, request):
            assert (failed, ids, first) == ([True] * len(failed), [], 0), node.failures()
            return
        assert ids == self.expected_ids(request)[first:], f"{name} generated other tokens"

    def _failed(self, node: LoopNode, request: Request) -> list[bool]:
        return [f.error.retryable for f in node.failures() if f.request == request.id]

    def expected_ids(self, request: Request) -> list[int]:
        """The ids that an undisturbed engine generates."""
        key = (request.prompt_ids, request.salt)
        if key not in self._expected_ids:
            self._num_references += 1
            name = RequestId(f"reference-{self._num_references}")
            reference = msgspec.structs.replace(request, id=name, attempt=1, time_left=None)
            [self._expected_ids[key]] = run_alone(self._reference, reference)
        return self._expected_ids[key]

    def expected_pages(self, request: Request | None = None) -> Pages:
        """Return the prompt's pages as an undisturbed engine computes them, with those of
        expect_page()."""
        request = request or self.request
        self.expected_ids(request)
        expected = pages(self._reference, request)
        if len(expected) < len(self.names(request)):  # its cache has evicted some
            del self._expected_ids[request.prompt_ids, request.salt]
            self.expected_ids(request)
            expected = pages(self._reference, request)
        return expected | self._replaced_pages

    def expect_page(self, name: BlockHash, data: bytes, ids: Callable[[], list[int]]) -> None:
        """Expect this valid page of another writer, and the ids that an engine generates with
        it."""
        self._replaced_pages[name] = data
        self._expected_ids[self.request.prompt_ids, self.request.salt] = ids()

    def compare_pages(self, name: str, request: Request | None = None) -> None:
        """Assert that each page of the prompt in the node's cache has the expected bytes."""
        wrong = self.wrong_pages(name, request)
        assert wrong == [], f"{name}: {len(wrong)} pages differ"

    def wrong_pages(self, name: str, request: Request | None = None) -> list[int]:
        """Return the indices of the prompt's pages in the node's cache with unexpected bytes."""
        request = request or self.request
        expected, actual = self.expected_pages(request), pages(self.node(name), request)
        return [
            at
            for at, (block, data) in enumerate(actual.items())
            if expected[block] != data and (self._exact or not close(expected[block], data))
        ]
