"""The connector on a real store: what it promises the step loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton_engine.api import Copied, Fetched, LookedUp, Published
from baton_kvstore.embedded import EmbeddedStore
from baton_kvstore.index import Index
from baton_node.jobs import PADDING
from baton_protocol.ids import BlockId, RequestId
from baton_protocol.store import InboxEntry, Marker
from tests.support.connectors import Harness, ref
from tests.support.kvstore import plain_client, wait_until


@pytest.fixture
def harness(store: EmbeddedStore) -> Iterator[Harness]:
    made = Harness(store)
    yield made
    made.connector.close()


def test_a_published_chunk_comes_back_into_other_blocks(harness: Harness) -> None:
    for block in range(1, 5):
        harness.fill(block, block)
    marker = harness.publish(b"chunk", [1, 2, 3, 4])
    assert harness.fetch(b"chunk", marker, (9, 8, 7, 6)).bytes == 4 * harness.block_bytes
    assert [harness.read(block) for block in (9, 8, 7, 6)] == [{1}, {2}, {3}, {4}]


def test_the_source_is_free_before_the_chunk_is_published(harness: Harness) -> None:
    harness.connector.publish(ref(b"chunk"), [BlockId(block) for block in (1, 2, 3, 4)])
    harness.until(lambda: harness.last(Published) is not None)
    assert [type(event) for event in harness.events] == [Copied, Published]


def test_blocks_that_hold_kv_already_are_not_written(harness: Harness) -> None:
    for block in range(1, 5):
        harness.fill(block, block)
    harness.fill(11, 77)
    marker = harness.publish(b"chunk", [1, 2, 3, 4])
    blocks = [PADDING, PADDING, BlockId(12), BlockId(13)]
    harness.connector.fetch(ref(b"chunk"), marker, blocks)
    harness.until(lambda: harness.last(Fetched) is not None)
    assert [harness.read(block) for block in (11, 12, 13)] == [{77}, {3}, {4}]


def test_a_lookup_finds_what_was_published_and_nothing_else(harness: Harness) -> None:
    marker = harness.publish(b"here", [1, 2, 3, 4])
    names = [ref(name).hash for name in (b"nowhere", b"here")]
    harness.connector.lookup(RequestId("r"), 3, names)
    harness.until(lambda: harness.last(LookedUp) is not None)
    assert harness.last(LookedUp) == LookedUp(RequestId("r"), 3, (None, marker))


def test_a_chunk_that_is_gone_loses_its_marker(harness: Harness, store: EmbeddedStore) -> None:
    marker = harness.publish(b"chunk")
    for url in store.data_urls:
        with plain_client(url) as client:
            client.flushall()
    assert not harness.fetch(b"chunk", marker, (5, 6, 7, 8)).ok
    wait_until(lambda: harness.look_up(b"chunk") == (None,), "the marker to be dropped")


def test_announcements_arrive_in_order_and_once(harness: Harness) -> None:
    me = ("n0", "e0")
    marker = Marker(0, "run", 1, 1, 0)
    for number in range(600):
        harness.connector.announce(me, InboxEntry(RequestId("r"), 1, "chunks", number, (marker,)))
    harness.connector.announce(me, InboxEntry(RequestId("r"), 1, "end"))
    harness.until(lambda: len(harness.events) >= 601)
    entries = [event for event in harness.events if isinstance(event, InboxEntry)]
    assert [entry.first for entry in entries[:-1]] == list(range(600))
    assert entries[-1].kind == "end"
    assert len(harness.events) == 601


def test_a_lookup_is_answered_although_the_index_is_away() -> None:
    with EmbeddedStore(64 << 20) as store:
        harness = Harness(store)
        try:
            store.stop()
            harness.connector.lookup(RequestId("r"), 1, [ref(b"x").hash, ref(b"y").hash])
            harness.until(lambda: harness.last(LookedUp) is not None)
            assert harness.last(LookedUp) == LookedUp(RequestId("r"), 1, (None, None))
            harness.connector.publish(ref(b"x"), [BlockId(b) for b in (1, 2, 3, 4)])
            harness.until(lambda: harness.last(Published) is not None)
            assert harness.last(Copied) is not None
            event = harness.last(Published)
            assert isinstance(event, Published)
            assert event.marker is None
            assert event.reason
        finally:
            harness.connector.close()


def test_an_unforeseen_error_of_the_index_neither_stops_the_inbox_nor_swallows_a_lookup(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads, lookups = iter([True]), iter([True])
    read_inbox, lookup = Index.read_inbox, Index.lookup

    async def read_badly(index: Index, *args: Any) -> Any:
        if next(reads, False):
            raise KeyError("nobody thought of it")
        return await read_inbox(index, *args)

    async def look_up_badly(index: Index, *args: Any) -> Any:
        if next(lookups, False):
            raise KeyError("nobody thought of it")
        return await lookup(index, *args)

    monkeypatch.setattr(Index, "read_inbox", read_badly)
    monkeypatch.setattr(Index, "lookup", look_up_badly)
    harness = Harness(store)
    try:
        harness.connector.lookup(RequestId("r"), 1, [ref(b"x").hash])
        harness.until(lambda: harness.last(LookedUp) is not None)
        assert harness.last(LookedUp) == LookedUp(RequestId("r"), 1, (None,))
        harness.connector.announce(("n0", "e0"), InboxEntry(RequestId("r"), 1, "end"))
        harness.until(lambda: harness.last(InboxEntry) is not None)
    finally:
        harness.connector.close()
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"] * 2


def test_closing_twice_and_with_work_in_flight_ends(harness: Harness) -> None:
    for number in range(20):
        harness.connector.publish(ref(b"%d" % number), [BlockId(b) for b in (1, 2, 3, 4)])
    harness.connector.close()
    harness.connector.close()
