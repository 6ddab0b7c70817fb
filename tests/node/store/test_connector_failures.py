"""A store that is gone, frozen, restarted empty or full, as the step loop sees it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.registry import Registry
from baton_kvstore.keys import inbox_key
from baton_node.store.base import Copied, Fetched, LookedUp, Published
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
    made = Harness(single)
    yield made
    made.close()


@pytest.fixture
def index_harness(single: EmbeddedStore) -> Iterator[Harness]:
    """For trouble of the index alone: a data server that is slow on a busy machine is none."""
    made = Harness(single, tuning=PATIENT)
    yield made
    made.close()


def sick(harness: Harness) -> None:
    wait_until(lambda: not harness.connector.healthy(), "the trouble to be noticed")


def well(harness: Harness) -> None:
    wait_until(harness.connector.healthy, "its end to be noticed")


def assert_said_once(told: list[str]) -> None:
    """Gone and back, not one line per request; a busy machine may see it come and go twice."""
    assert told[0::2] == [line for line in told if "cannot be used" in line]
    assert told[1::2] == [line for line in told if "can be used again" in line]
    assert len(told) in (2, 4), told


def entry(number: int) -> InboxEntry:
    return InboxEntry(RequestId("r"), 1, "chunks", number)


def refused_at_once(harness: Harness) -> None:
    """A publish settles inside the call: nobody is asked."""
    blocks = tuple(BlockId(block) for block in (1, 2, 3, 4))
    harness.put(b"refused", blocks)
    copied, published = harness.connector.poll()
    assert copied == Copied(ref(b"refused"), blocks)
    assert isinstance(published, Published)
    assert published.marker is None
    assert published.reason


def test_an_index_that_is_gone_costs_nobody_time_and_is_used_again(
    index_harness: Harness, single: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    index_harness.fill(1, 7)
    marker = index_harness.publish(b"chunk")
    with held_down(single, "index"):
        sick(index_harness)
        for _ in range(20):
            refused_at_once(index_harness)
            index_harness.connector.lookup(RequestId("r"), 1, [ref(b"chunk").hash])
            assert index_harness.connector.poll() == [LookedUp(RequestId("r"), 1, (None,))]
            index_harness.connector.announce(ME, entry(1))  # dropped
        assert index_harness.fetch(b"chunk", marker, (5, 6, 7, 8)).ok  # the data server is well
        assert index_harness.read(5) == {7}
    well(index_harness)
    assert index_harness.look_up(b"chunk") == (None,)  # it came back empty
    assert index_harness.look_up(b"again") == (None,)
    again = index_harness.publish(b"again")
    assert index_harness.look_up(b"again") == (again,)
    index_harness.connector.announce(ME, entry(2))
    assert index_harness.next(InboxEntry) == entry(2)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert_said_once(told)
    assert "the store's index cannot be used: " in told[0]
    assert "unix://" in told[0]
    assert told[1] == "the store's index can be used again"


def test_a_frozen_index_costs_one_deadline_and_says_nothing_twice(
    index_harness: Harness, single: EmbeddedStore
) -> None:
    marker = index_harness.publish(b"chunk")
    index_harness.connector.announce(ME, entry(1))
    assert index_harness.next(InboxEntry) == entry(1)
    with frozen(single.pid("index")):
        assert index_harness.look_up(b"chunk") == (None,)
        sick(index_harness)
        refused_at_once(index_harness)
        index_harness.connector.lookup(RequestId("r"), 1, [ref(b"chunk").hash])
        assert index_harness.connector.poll() == [LookedUp(RequestId("r"), 1, (None,))]
    well(index_harness)
    assert index_harness.look_up(b"chunk") == (marker,)
    index_harness.connector.announce(ME, entry(2))
    assert index_harness.next(InboxEntry) == entry(2)
    assert index_harness.last(InboxEntry) is None


def test_a_put_whose_marker_finds_the_index_frozen_settles(
    index_harness: Harness, single: EmbeddedStore
) -> None:
    index_harness.publish(b"before")
    with frozen(single.pid("index")):
        event = index_harness.try_publish(b"chunk")
        assert event.marker is None
        assert event.reason
    well(index_harness)


def test_a_full_index_takes_nothing_and_still_answers(
    index_harness: Harness, single: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    marker = index_harness.publish(b"chunk")
    with plain_client(single.index_url) as client:
        client.config_set("maxmemory", 1)
        sick(index_harness)
        refused_at_once(index_harness)
        assert index_harness.look_up(b"chunk") == (marker,)
        client.config_set("maxmemory", 64 << 20)
    well(index_harness)
    assert index_harness.look_up(b"chunk", b"more") == (marker, None)
    assert index_harness.publish(b"more")
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert_said_once(told)
    assert "OOM" in told[0]


def test_a_restarted_data_server_s_markers_are_not_believed(
    harness: Harness, single: EmbeddedStore
) -> None:
    old = harness.publish(b"chunk")
    os.kill(single.pid("data0"), signal.SIGKILL)
    wait_until(lambda: harness.connector.plane.run_ids[0] != old.run_id, "the new run id")
    well(harness)
    assert harness.look_up(b"chunk") == (None,)
    new = harness.publish(b"chunk")
    assert new.run_id != old.run_id
    assert harness.look_up(b"chunk") == (new,)


def test_a_fetch_by_an_old_marker_misses_and_drops_it(
    harness: Harness, single: EmbeddedStore
) -> None:
    old = harness.publish(b"chunk")
    with held_down(single, "data0"):
        pass
    missed: list[Fetched] = []

    def gone() -> bool:
        missed.append(harness.fetch(b"chunk", old, (5, 6, 7, 8)))
        with plain_client(single.index_url) as client:
            return not any(b"{i}" in key for key in client.scan_iter())

    wait_until(gone, "the marker to be dropped")
    assert not any(event.ok for event in missed)


def test_frozen_data_servers_cost_one_deadline_and_write_nothing_late(
    harness: Harness, single: EmbeddedStore
) -> None:
    for block in range(1, 5):
        harness.fill(block, block)
    marker = harness.publish(b"chunk")
    with frozen(single.pid("data0")):
        harness.put(b"other")
        assert not harness.fetch(b"chunk", marker, (5, 6, 7, 8)).ok
        assert harness.next(Published).marker is None
        sick(harness)
        refused_at_once(harness)
        assert harness.look_up(b"chunk") == (None,)  # who would fetch it would wait
        for block in range(5, 9):  # given to somebody else
            harness.fill(block, 99)
    well(harness)
    assert harness.look_up(b"chunk") == (marker,)
    assert harness.fetch(b"chunk", marker, (9, 10, 11, 12)).ok
    assert [harness.read(block) for block in range(5, 9)] == [{99}] * 4
    assert [harness.read(block) for block in range(9, 13)] == [{1}, {2}, {3}, {4}]


def test_with_one_of_two_data_servers_frozen_chunks_are_still_published() -> None:
    names = [b"%d" % number for number in range(12)]
    with EmbeddedStore(64 << 20, data_instances=2) as store, closing(Harness(store)) as harness:
        before = {name: harness.publish(name) for name in names}
        with frozen(store.pid("data1")):
            wait_until(lambda: harness.connector.plane.troubles[1] != "", "it to be noticed")
            assert harness.connector.healthy()
            known = dict(zip(names, harness.look_up(*names), strict=True))
            assert known == {n: m if m.instance == 0 else None for n, m in before.items()}
            assert {harness.publish(name).instance for name in names} == {0}
        assert {marker.instance for marker in before.values()} == {0, 1}


def test_full_data_servers_stop_publishing_and_nothing_else(
    harness: Harness, single: EmbeddedStore
) -> None:
    harness.publish(b"chunk")
    with plain_client(single.data_urls[0]) as client:
        client.config_set("maxmemory", 1)
        assert harness.try_publish(b"first").reason == "store full"
        assert not harness.connector.healthy()
        refused_at_once(harness)
        harness.connector.announce(ME, entry(1))  # such as the end of what was announced
        assert harness.next(InboxEntry) == entry(1)
        client.config_set("maxmemory", 64 << 20)
    well(harness)
    assert harness.publish(b"second")


def test_a_command_that_only_one_key_refuses_is_no_trouble(
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


async def test_whatever_is_written_has_a_lifetime(
    index_harness: Harness, single: EmbeddedStore
) -> None:
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


def test_closing_does_not_wait_for_a_frozen_store(single: EmbeddedStore) -> None:
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
