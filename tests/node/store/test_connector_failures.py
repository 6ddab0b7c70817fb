"""The connector on a store that is down, frozen, restarted empty, or full."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.registry import Registry
from baton_kvstore.keys import inbox_key
from baton_node.store.base import ChunkCopied, ChunkFetched, ChunkPublished, ChunksLookedUp
from baton_node.store.null_connector import NoStore
from baton_protocol.ids import BlockId, Epoch, NodeId, RequestId
from baton_protocol.store import InboxEntry
from tests.support.nodes.connectors import Harness, ref
from tests.support.stores.kvstore import (
    PATIENT,
    frozen,
    held_down,
    immortal_keys,
    node_report,
    plain_client,
    wait_until,
)

pytestmark = pytest.mark.integration

ME = ("n0", "e0")


@pytest.fixture
def harness(single: EmbeddedStore) -> Iterator[Harness]:
    harness = Harness(single)
    yield harness
    harness.close()


@pytest.fixture
def index_harness(single: EmbeddedStore) -> Iterator[Harness]:
    """A connector for faults of the index. It tolerates a data server that a busy machine slows."""
    harness = Harness(single, tuning=PATIENT)
    yield harness
    harness.close()


def wait_until_unhealthy(harness: Harness) -> None:
    wait_until(lambda: not harness.connector.healthy(), "an unhealthy store")


def wait_until_healthy(harness: Harness) -> None:
    wait_until(harness.connector.healthy, "a healthy store")


def assert_logged_once(warnings: list[str]) -> None:
    """Assert one line for the failure and one for the recovery, and not one per request. On a busy
    machine both may happen twice."""
    assert warnings[0::2] == [line for line in warnings if "cannot be used" in line]
    assert warnings[1::2] == [line for line in warnings if "can be used again" in line]
    assert len(warnings) in (2, 4), warnings


def entry(number: int) -> InboxEntry:
    return InboxEntry(RequestId("r"), 1, "chunks", number)


def assert_refused_at_once(harness: Harness) -> None:
    """Assert that a publish settles inside its call, without a command to the store."""
    blocks = tuple(BlockId(block) for block in (1, 2, 3, 4))
    harness.put(b"refused", blocks)
    copied, published = harness.connector.poll()
    assert copied == ChunkCopied(ref(b"refused"), blocks)
    assert isinstance(published, ChunkPublished)
    assert published.marker is None
    assert published.reason


def test_an_index_that_is_down_costs_no_time_and_is_used_after_its_return(
    index_harness: Harness, single: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    index_harness.fill(1, 7)
    marker = index_harness.publish(b"chunk")
    with held_down(single, "index"):
        wait_until_unhealthy(index_harness)
        for _ in range(20):
            assert_refused_at_once(index_harness)
            index_harness.connector.lookup(RequestId("r"), 1, [ref(b"chunk").hash])
            assert index_harness.connector.poll() == [ChunksLookedUp(RequestId("r"), 1, (None,))]
            index_harness.connector.announce(ME, entry(1))  # dropped
        assert index_harness.fetch(b"chunk", marker, (5, 6, 7, 8)).ok  # the data server works
        assert index_harness.read(5) == {7}
    wait_until_healthy(index_harness)
    assert index_harness.look_up(b"chunk") == (None,)  # it has restarted empty
    assert index_harness.look_up(b"again") == (None,)
    again = index_harness.publish(b"again")
    assert index_harness.look_up(b"again") == (again,)
    index_harness.connector.announce(ME, entry(2))
    assert index_harness.next(InboxEntry) == entry(2)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert_logged_once(warnings)
    assert "the store's index cannot be used: " in warnings[0]
    assert "unix://" in warnings[0]
    assert warnings[1] == "the store's index can be used again"


def test_a_frozen_index_costs_one_deadline_and_delivers_no_entry_twice(
    index_harness: Harness, single: EmbeddedStore
) -> None:
    marker = index_harness.publish(b"chunk")
    index_harness.connector.announce(ME, entry(1))
    assert index_harness.next(InboxEntry) == entry(1)
    with frozen(single.pid("index")):
        assert index_harness.look_up(b"chunk") == (None,)
        wait_until_unhealthy(index_harness)
        assert_refused_at_once(index_harness)
        index_harness.connector.lookup(RequestId("r"), 1, [ref(b"chunk").hash])
        assert index_harness.connector.poll() == [ChunksLookedUp(RequestId("r"), 1, (None,))]
    wait_until_healthy(index_harness)
    assert index_harness.look_up(b"chunk") == (marker,)
    index_harness.connector.announce(ME, entry(2))
    assert index_harness.next(InboxEntry) == entry(2)
    assert index_harness.last(InboxEntry) is None


def test_a_put_settles_if_the_index_is_frozen_when_its_marker_is_written(
    index_harness: Harness, single: EmbeddedStore
) -> None:
    index_harness.publish(b"before")
    with frozen(single.pid("index")):
        event = index_harness.try_publish(b"chunk")
        assert event.marker is None
        assert event.reason
    wait_until_healthy(index_harness)


def test_a_full_index_accepts_no_markers_and_still_answers_lookups(
    index_harness: Harness, single: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    marker = index_harness.publish(b"chunk")
    with plain_client(single.index_url) as client:
        client.config_set("maxmemory", 1)
        wait_until_unhealthy(index_harness)
        assert_refused_at_once(index_harness)
        assert index_harness.look_up(b"chunk") == (marker,)
        client.config_set("maxmemory", 64 << 20)
    wait_until_healthy(index_harness)
    assert index_harness.look_up(b"chunk", b"more") == (marker, None)
    assert index_harness.publish(b"more")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert_logged_once(warnings)
    assert "OOM" in warnings[0]


def test_markers_of_a_data_server_that_has_restarted_are_ignored(
    harness: Harness, single: EmbeddedStore
) -> None:
    old = harness.publish(b"chunk")
    os.kill(single.pid("data0"), signal.SIGKILL)
    wait_until(lambda: harness.connector.plane.run_ids[0] != old.run_id, "the new run id")
    wait_until_healthy(harness)
    assert harness.look_up(b"chunk") == (None,)
    new = harness.publish(b"chunk")
    assert new.run_id != old.run_id
    assert harness.look_up(b"chunk") == (new,)


def test_a_fetch_by_an_old_marker_misses_and_drops_the_marker(
    harness: Harness, single: EmbeddedStore
) -> None:
    old = harness.publish(b"chunk")
    with held_down(single, "data0"):
        pass
    fetches: list[ChunkFetched] = []

    def is_dropped() -> bool:
        fetches.append(harness.fetch(b"chunk", old, (5, 6, 7, 8)))
        with plain_client(single.index_url) as client:
            return not any(b"{i}" in key for key in client.scan_iter())

    wait_until(is_dropped, "the marker to be dropped")
    assert not any(event.ok for event in fetches)


def test_a_frozen_data_server_costs_one_deadline_and_writes_no_page_late(
    harness: Harness, single: EmbeddedStore
) -> None:
    for block in range(1, 5):
        harness.fill(block, block)
    marker = harness.publish(b"chunk")
    with frozen(single.pid("data0")):
        harness.put(b"other")
        assert not harness.fetch(b"chunk", marker, (5, 6, 7, 8)).ok
        assert harness.next(ChunkPublished).marker is None
        wait_until_unhealthy(harness)
        assert_refused_at_once(harness)
        assert harness.look_up(b"chunk") == (None,)  # a fetch would only wait
        for block in range(5, 9):  # other requests own these blocks now
            harness.fill(block, 99)
    wait_until_healthy(harness)
    assert harness.look_up(b"chunk") == (marker,)
    assert harness.fetch(b"chunk", marker, (9, 10, 11, 12)).ok
    assert [harness.read(block) for block in range(5, 9)] == [{99}] * 4
    assert [harness.read(block) for block in range(9, 13)] == [{1}, {2}, {3}, {4}]


def test_with_one_of_two_data_servers_frozen_chunks_are_still_published() -> None:
    names = [b"%d" % number for number in range(12)]
    with EmbeddedStore(64 << 20, data_instances=2) as store, closing(Harness(store)) as harness:
        before = {name: harness.publish(name) for name in names}
        with frozen(store.pid("data1")):
            wait_until(lambda: harness.connector.plane.troubles[1] != "", "the trouble of data1")
            assert harness.connector.healthy()
            known = dict(zip(names, harness.look_up(*names), strict=True))
            assert known == {n: m if m.instance == 0 else None for n, m in before.items()}
            assert {harness.publish(name).instance for name in names} == {0}
        assert {marker.instance for marker in before.values()} == {0, 1}


def test_a_full_data_server_stops_only_publishing(harness: Harness, single: EmbeddedStore) -> None:
    harness.publish(b"chunk")
    with plain_client(single.data_urls[0]) as client:
        client.config_set("maxmemory", 1)
        assert harness.try_publish(b"first").reason == "store full"
        assert not harness.connector.healthy()
        assert_refused_at_once(harness)
        harness.connector.announce(ME, entry(1))  # such as the end of a hand-off
        assert harness.next(InboxEntry) == entry(1)
        client.config_set("maxmemory", 64 << 20)
    wait_until_healthy(harness)
    assert harness.publish(b"second")


def test_a_command_that_the_index_refuses_for_one_key_does_not_make_it_unhealthy(
    index_harness: Harness, single: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    with plain_client(single.index_url) as client:
        key = inbox_key("default", NodeId("other"), Epoch("e1"))
        client.set(key, b"no stream", px=60_000)
        index_harness.connector.announce(("other", "e1"), entry(1))
        wait_until(lambda: "WRONGTYPE" in str(client.info("errorstats")), "the refusal")
    assert index_harness.publish(b"chunk")
    assert index_harness.connector.healthy()
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_every_written_key_has_a_ttl(index_harness: Harness, single: EmbeddedStore) -> None:
    marker = index_harness.publish(b"kept")
    lost = index_harness.publish(b"lost")
    assert index_harness.look_up(b"kept") == (marker,)
    for number in range(300):
        index_harness.connector.announce(ME, entry(number))
        index_harness.next(InboxEntry)
    with plain_client(single.data_urls[0]) as client:
        client.flushall()
    assert not index_harness.fetch(b"lost", lost, (5, 6, 7, 8)).ok
    assert index_harness.publish(b"again")
    async with Registry(single.index_url, "default") as registry:
        await registry.register(node_report("a"))
    for url in (single.index_url, *single.data_urls):
        with plain_client(url) as client:
            assert client.dbsize() > 0
        assert immortal_keys(url) == []


def test_close_does_not_wait_for_a_frozen_store(single: EmbeddedStore) -> None:
    harness = Harness(single)
    marker = harness.publish(b"chunk")
    with frozen(single.pid("index")), frozen(single.pid("data0")):
        harness.put(b"other")
        harness.get(b"chunk", marker, (5, 6, 7, 8))
        harness.connector.lookup(RequestId("r"), 1, [ref(b"chunk").hash])
        harness.close()


def test_a_node_without_a_store_publishes_nothing() -> None:
    connector = NoStore()
    assert not connector.healthy()
    connector.close()
