"""Cache events: after a gap the router requests a listing, and it bounds the rate of events."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from baton_protocol.ids import BlockHash, Epoch, NodeId
from baton_protocol.link import CacheEvents, Resync
from baton_router.nodes.kv_events import LISTINGS, KVEventListener
from baton_router.nodes.pool_view import PoolView
from tests.router import pools
from tests.support.clock import Clock
from tests.support.nodes.fake_node import FakeNode, make_report
from tests.support.waiting import until

EPOCH, NODE = Epoch("epoch-1"), NodeId("decode-0")
NAMES = tuple(BlockHash(n.to_bytes(16, "big")) for n in range(1000))


def make_listener(
    clock: Clock, *nodes: str, events_per_s: int = 100
) -> tuple[KVEventListener, PoolView]:
    view = PoolView(clock, max_chunks=10_000)
    for name in nodes or (NODE,):
        view.hello(make_report(name, "decode"))
    return KVEventListener(view, clock, events_per_s), view


def events(seq: int, count: int = 1, **more: Any) -> CacheEvents:
    return CacheEvents(EPOCH, stored=NAMES[:count], seq=seq, **more)


def known_chunks(view: PoolView) -> int:
    return view.chunks.longest(NAMES)


def test_after_a_missing_frame_the_router_forgets_the_chunks_and_requests_one_listing() -> None:
    listener, view = make_listener(Clock())
    listener.apply_events(NODE, events(7, 2, reset=True))
    listener.apply_events(NODE, events(8, 3))
    assert (known_chunks(view), listener.next_listings()) == (3, [])
    listener.apply_events(NODE, events(10, 4))
    assert (known_chunks(view), view.nodes[NODE].chunks, listener.dropped) == (0, 0, 4)
    assert (listener.next_listings(), listener.next_listings()) == ([NODE], [])
    listener.apply_events(NODE, events(11, 5))
    assert (known_chunks(view), listener.dropped) == (0, 9)
    listener.apply_events(NODE, events(11, 6, reset=True))
    listener.apply_events(NODE, events(12, 7))
    assert (known_chunks(view), listener.next_listings()) == (7, [])


def test_frames_without_a_number_are_always_applied() -> None:
    listener, view = make_listener(Clock(), events_per_s=10)
    for count in (5, 50, 500):
        listener.apply_events(NODE, events(0, count))
        assert known_chunks(view) == count
    assert (listener.dropped, listener.next_listings()) == (0, [])


def test_excess_events_are_dropped_with_one_warning_and_listed_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    listener, view = make_listener(clock, "n0", "n1", "n2")
    with caplog.at_level(logging.WARNING):
        listener.apply_events(NodeId("n0"), events(1, 90))
        listener.apply_events(NodeId("n1"), events(1, 40))
        listener.apply_events(NodeId("n2"), events(1, 40))
    assert [record.message for record in caplog.records] == [
        "chunk events exceed 100 a second; the router treats some nodes' caches as empty until"
        " they list their chunks"
    ]
    assert (listener.dropped, known_chunks(view)) == (80, 90)
    assert listener.next_listings() == []
    clock.advance(0.3)
    assert listener.next_listings() == []
    clock.advance(0.2)
    assert listener.next_listings() == ["n1", "n2"]
    listener.apply_events(
        NodeId("n1"), events(1, 95, reset=True)
    )  # listings of any size are applied
    assert known_chunks(view) == 95


def test_listings_are_requested_in_groups_and_not_from_forgotten_nodes() -> None:
    names = [f"n{n}" for n in range(LISTINGS + 3)]
    listener, _ = make_listener(Clock(), *names, events_per_s=1000)
    for name in names:
        listener.apply_events(NodeId(name), events(5))
    listener.forget_node(NodeId(names[-1]))
    assert listener.next_listings() == names[:LISTINGS]
    assert listener.next_listings() == names[LISTINGS:-1]


@pytest.mark.integration
async def test_a_gap_on_a_link_is_repaired_by_a_listing(decode: FakeNode) -> None:
    decode.chunks = NAMES[:3]
    async with pools.running(decode) as client:
        view = client.router.view
        await until(lambda: view.nodes[NODE].chunks == 3)
        decode.chunks, decode.events = NAMES[:8], 5
        await decode.say(events(5, 8))
        await until(lambda: len(decode.got_of(Resync)) == 1)
        await until(lambda: known_chunks(view) == 8)
        await decode.say(CacheEvents(EPOCH, evicted=NAMES[2:3], seq=6))
        await until(lambda: known_chunks(view) == 2)
        assert len(decode.got_of(Resync)) == 1
        assert decode.links == 1
