"""Pages that sockets send from and receive into, under a desk: torch's memory on a CPU.

A request ends while a value is half way out of its pages, or into them, and another one wants all
pages at once. They change hands when the transfer has settled, not before.
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
from baton_node.store.base import Copied, Fetched
from baton_node.store.null_connector import NoStore
from baton_node.store.redis_connector import StoreAddress
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Abort, PrefillJob, RunJob
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from tests.support.engines.torch_engines import make_request, small_engine
from tests.support.kv_faults.nodes import StageNode, Watched, pages
from tests.support.nodes.step_loops import LoopNode, settle, spin
from tests.support.stores.kvstore import PATIENCE_S, plain_client
from tests.support.wires.link_proxy import LinkProxy
from tests.support.wires.wire import WireLoop

pytestmark = pytest.mark.integration

MODEL = "llama-gqa1"
BLOCK, CHUNK_BLOCKS, CHUNKS, OUTPUTS = 16, 2, 3, 3
TIGHT = CHUNKS * CHUNK_BLOCKS + 1  # one request and its outputs fill the pool
PARAMS = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True)
NOBODY = (NodeId("nobody"), Epoch("never"))
ROUNDS = 6
MOST_ROUNDS = 60  # on a machine so busy that in none of the first a transfer was caught
WANTED_S = 0.02  # so long the other request wants the pages before the bytes flow again
HALF = 20_000  # bytes of a value, which has more than twice as many

Build = Callable[[int], EngineCore]


def ask(name: str, seed: int) -> Request:
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
def node(single: EmbeddedStore, link: LinkProxy, build: Build) -> Iterator[StageNode]:
    """With a pool for one request, and the link before its data server."""

    def connect(engine: EngineCore) -> Watched:
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
        connector = Watched(address, engine.memory)
        connector.start()
        assert connector.plane.wait_connected(PATIENCE_S)
        return connector

    made = StageNode("d0", connect, engine=build(TIGHT), lookup_wait_s=PATIENCE_S)
    yield made
    link.mend()
    made.close()


@pytest.fixture
def calm(build: Build) -> Iterator[LoopNode]:
    """Undisturbed, without a store."""
    made = LoopNode("calm", lambda _: NoStore(), engine=build(100))
    yield made
    made.close()


def run(node: LoopNode, request: Request) -> list[int]:
    node.take(RunJob(request))
    spin([node], lambda: len(node.ids(request.id)) == OUTPUTS, "the request's end")
    settle([node])
    return node.ids(request.id)


def publish(node: StageNode, request: Request) -> None:
    node.take(PrefillJob(request, *NOBODY))
    spin([node], lambda: bool(node.tokens(request.id)) and node.loop.idle, "the job's end")
    assert node.published() == CHUNKS


def rounds(enough: Callable[[], bool]) -> Iterator[int]:
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and enough():
            return
        yield number


def race(node: StageNode, first: Request, caught: threading.Event, other: Request) -> None:
    """End a request whose transfer is caught half way; give the other one time to take its
    pages."""
    spin([node], caught.is_set, "a value half way")
    node.take(Abort(first.id, first.attempt), RunJob(other))
    until = time.monotonic() + WANTED_S
    while not node.ids(other.id) and time.monotonic() < until:
        node.loop.turn()


def test_pages_of_an_aborted_fetch_change_hands_when_it_has_settled(
    node: StageNode, link: LinkProxy, calm: LoopNode
) -> None:
    publish(node, ask("stored", 0))
    run(node, ask("between", 1))  # its pages push the stored prompt out of the cache
    met = 0
    for number in rounds(lambda: met > 0):  # noqa: B023
        first, other = ask(f"first {number}", 0), ask(f"other {number}", 10 + number)
        node.events.clear()
        caught = link.hold_replies(HALF)
        node.take(RunJob(first))
        race(node, first, caught, other)
        if not any(isinstance(event, Fetched) for event in node.events):
            met += not node.freed
            assert node.ids(other.id) == []
        link.mend()
        spin([node], lambda: len(node.ids(other.id)) == OUTPUTS, "the other's end")  # noqa: B023
        settle([node])
        assert node.ids(other.id) == run(calm, other)
        assert pages(node, other) == pages(calm, other)
    assert met > 0, "no fetch was in flight when its request had ended"


def test_pages_of_an_aborted_put_change_hands_when_it_has_settled(
    node: StageNode, link: LinkProxy, calm: LoopNode, single: EmbeddedStore
) -> None:
    met = 0
    for number in rounds(lambda: met > 0):  # noqa: B023
        first, other = ask(f"first {number}", 100 + number), ask(f"other {number}", 10 + number)
        node.events.clear()
        # Each chunk's: they may go over several connections.
        caught = [link.hold_at(lambda words: words[0] == b"SET", HALF) for _ in range(CHUNKS)]
        node.take(PrefillJob(first, *NOBODY))
        race(node, first, caught[0], other)
        if not any(isinstance(event, Copied) for event in node.events):
            met += not node.freed
            assert node.ids(other.id) == []
        link.mend()
        spin([node], lambda: len(node.ids(other.id)) == OUTPUTS, "the other's end")  # noqa: B023
        settle([node])
        run(calm, first)
        assert node.ids(other.id) == run(calm, other)
        assert pages(node, other) == pages(calm, other)
        assert stored(node, first, single) <= expected(calm, first)
    assert met > 0, "no put was in flight when its request had ended"


def stored(node: LoopNode, request: Request, store: EmbeddedStore) -> set[bytes]:
    """Payloads that are on the data server under the names of the prompt's chunks."""
    names = node.engine.block_hashes(request)[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]
    with plain_client(store.data_urls[0]) as client:
        keys = [chunk_key(node.engine.info.fingerprint, name) for name in names]
        return {value[HEADER_BYTES:] for value in client.mget(keys) if value}


def expected(calm: LoopNode, request: Request) -> set[bytes]:
    """The same of an engine that nobody disturbs."""
    names = calm.engine.block_hashes(request)
    there = pages(calm, request)
    begins = range(0, len(names), CHUNK_BLOCKS)
    return {b"".join(there[name] for name in names[at : at + CHUNK_BLOCKS]) for at in begins}


def test_what_a_damaged_value_left_in_the_pages_does_not_count(
    node: StageNode, calm: LoopNode, single: EmbeddedStore
) -> None:
    """It is not finite, either: each number is a NaN."""
    publish(node, ask("stored", 0))
    run(node, ask("between", 1))
    with plain_client(single.data_urls[0]) as client:
        for key in client.scan_iter():
            value = client.get(key)
            assert isinstance(value, bytes)
            client.set(key, value[:HEADER_BYTES].ljust(len(value), b"\xff"), keepttl=True)
    node.events.clear()
    again = ask("again", 0)
    assert run(node, again) == run(calm, again)
    assert [reason for reason in node.lost() if "checksum" not in reason] == []
    assert len(node.lost()) == CHUNKS
    assert pages(node, again) == pages(calm, again)
