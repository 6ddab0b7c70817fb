"""Transfers whose sockets read and write torch's KV pages directly, without a staging buffer.

A request ends while one of its values is half sent or half received, and another request needs all
pages at once. The pages change owners only when the transfer has settled.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_kvstore.data.chunk_format import HEADER_BYTES
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_node.store.address import StoreAddress
from baton_node.store.base import ChunkCopied, ChunkFetched
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Abort, PrefillJob, RunJob
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.support.engines.torch_engines import make_request, small_engine
from tests.support.kv_faults.nodes import RecordingConnector, RecordingNode, pages
from tests.support.nodes.step_loops import NOBODY, LoopNode, settle, spin
from tests.support.stores.kvstore import PATIENCE_S, plain_client
from tests.support.wires.link_proxy import LinkProxy
from tests.support.wires.wire import WireLoop

pytestmark = pytest.mark.integration

MODEL = "llama-gqa1"
BLOCK, CHUNK_BLOCKS, CHUNKS, OUTPUTS = 16, 2, 3, 3
TIGHT = CHUNKS * CHUNK_BLOCKS + 1  # blocks: one request and its outputs fill the pool
PARAMS = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True)
ROUNDS = 6
MOST_ROUNDS = 60  # if a busy machine lets no transfer be caught in the first ROUNDS
WANTED_S = 0.02  # how long the other request wants the pages before the bytes flow again
HALF = 20_000  # bytes; less than half of a value

Build = Callable[[int], EngineCore]


def request_of(name: str, seed: int) -> Request:
    rng = random.Random(seed)
    ids = [rng.randrange(32, 127) for _ in range(CHUNKS * CHUNK_BLOCKS * BLOCK + 5)]
    return make_request(name, ids, PARAMS)


@pytest.fixture
def link(single: EmbeddedStore) -> Iterator[LinkProxy]:
    loop = WireLoop()
    link = LinkProxy(loop, single.data_urls[0])
    yield link
    link.close()
    loop.close()


@pytest.fixture
def build(tiny_model: Callable[[str], Path]) -> Build:
    folder = tiny_model(MODEL)
    return lambda blocks: small_engine(folder, kv_blocks=blocks, chunk_blocks=CHUNK_BLOCKS)


@pytest.fixture
def node(single: EmbeddedStore, link: LinkProxy, build: Build) -> Iterator[RecordingNode]:
    """A node with a pool for one request, behind a proxy of its data server."""

    def connect(engine: EngineCore) -> RecordingConnector:
        assert engine.memory.views([]) is not None
        address = StoreAddress(
            index_url=single.index_url,
            data_urls=(link.url,),
            pool="default",
            node=NodeId("d0"),
            epoch=Epoch("epoch-of-d0"),
            fingerprint=engine.info.fingerprint,
            write_behind_bandwidth=0,
        )
        connector = RecordingConnector(address, engine.memory)
        connector.start()
        assert connector.plane.wait_connected(PATIENCE_S)
        return connector

    node = RecordingNode("d0", connect=connect, engine=build(TIGHT), lookup_wait_s=PATIENCE_S)
    yield node
    link.mend()
    node.close()


@pytest.fixture
def reference(build: Build) -> Iterator[LoopNode]:
    """An undisturbed node without a store."""
    node = LoopNode("reference", engine=build(100))
    yield node
    node.close()


def run(node: LoopNode, request: Request) -> list[int]:
    node.take(RunJob(request))
    spin([node], lambda: len(node.ids(request.id)) == OUTPUTS, "the request's end")
    settle([node])
    return node.ids(request.id)


def publish(node: RecordingNode, request: Request) -> None:
    node.take(PrefillJob(request, *NOBODY))
    spin([node], lambda: bool(node.tokens(request.id)) and node.loop.idle, "the job's end")
    assert node.published() == CHUNKS


def rounds(enough: Callable[[], bool]) -> Iterator[int]:
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and enough():
            return
        yield number


def race(node: RecordingNode, first: Request, caught: threading.Event, other: Request) -> None:
    """Abort a request in the middle of a transfer, and give the other request time to take its
    pages."""
    spin([node], caught.is_set, "a half transferred value")
    node.take(Abort(first.id, first.attempt), RunJob(other))
    deadline = time.monotonic() + WANTED_S
    while not node.ids(other.id) and time.monotonic() < deadline:
        node.loop.turn()


def test_pages_of_an_aborted_fetch_are_reused_only_when_it_has_settled(
    node: RecordingNode, link: LinkProxy, reference: LoopNode
) -> None:
    publish(node, request_of("stored", 0))
    run(node, request_of("between", 1))  # its pages evict the stored prompt from the cache
    in_flight = 0
    for number in rounds(lambda: in_flight > 0):  # noqa: B023
        first, other = request_of(f"first {number}", 0), request_of(f"other {number}", 10 + number)
        node.events.clear()
        caught = link.hold_replies(HALF)
        node.take(RunJob(first))
        race(node, first, caught, other)
        if not any(isinstance(event, ChunkFetched) for event in node.events):
            in_flight += not node.freed
            assert node.ids(other.id) == []
        link.mend()
        spin([node], lambda: len(node.ids(other.id)) == OUTPUTS, "the other request's end")  # noqa: B023
        settle([node])
        assert node.ids(other.id) == run(reference, other)
        assert pages(node, other) == pages(reference, other)
    assert in_flight > 0, "no fetch was in flight when its request ended"


def test_pages_of_an_aborted_put_are_reused_only_when_it_has_settled(
    node: RecordingNode, link: LinkProxy, reference: LoopNode, single: EmbeddedStore
) -> None:
    in_flight = 0
    for number in rounds(lambda: in_flight > 0):  # noqa: B023
        first, other = (
            request_of(f"first {number}", 100 + number),
            request_of(f"other {number}", 10 + number),
        )
        node.events.clear()
        # One trap per chunk, since the puts may use several connections.
        caught = [link.hold_at(lambda words: words[0] == b"SET", HALF) for _ in range(CHUNKS)]
        node.take(PrefillJob(first, *NOBODY))
        race(node, first, caught[0], other)
        if not any(isinstance(event, ChunkCopied) for event in node.events):
            in_flight += not node.freed
            assert node.ids(other.id) == []
        link.mend()
        spin([node], lambda: len(node.ids(other.id)) == OUTPUTS, "the other request's end")  # noqa: B023
        settle([node])
        run(reference, first)
        assert node.ids(other.id) == run(reference, other)
        assert pages(node, other) == pages(reference, other)
        assert stored(node, first, single) <= expected(reference, first)
    assert in_flight > 0, "no put was in flight when its request ended"


def stored(node: LoopNode, request: Request, store: EmbeddedStore) -> set[bytes]:
    """Return the payloads that the data server holds for the prompt's chunks."""
    names = node.engine.block_hashes(request)[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]
    with plain_client(store.data_urls[0]) as client:
        keys = [chunk_key(node.engine.info.fingerprint, name) for name in names]
        return {value[HEADER_BYTES:] for value in client.mget(keys) if value}


def expected(reference: LoopNode, request: Request) -> set[bytes]:
    """Return the payloads that an undisturbed engine computes for the prompt's chunks."""
    names = reference.engine.block_hashes(request)
    pages_by_hash = pages(reference, request)
    starts = range(0, len(names), CHUNK_BLOCKS)
    return {
        b"".join(pages_by_hash[name] for name in names[at : at + CHUNK_BLOCKS]) for at in starts
    }


def test_the_bytes_of_a_damaged_value_do_not_affect_the_result(
    node: RecordingNode, reference: LoopNode, single: EmbeddedStore
) -> None:
    """The damaged payload consists of NaNs."""
    publish(node, request_of("stored", 0))
    run(node, request_of("between", 1))
    with plain_client(single.data_urls[0]) as client:
        for key in client.scan_iter():
            value = client.get(key)
            assert isinstance(value, bytes)
            client.set(key, value[:HEADER_BYTES].ljust(len(value), b"\xff"), keepttl=True)
    node.events.clear()
    again = request_of("again", 0)
    assert run(node, again) == run(reference, again)
    assert [reason for reason in node.lost() if "checksum" not in reason] == []
    assert len(node.lost()) == CHUNKS
    assert pages(node, again) == pages(reference, again)
