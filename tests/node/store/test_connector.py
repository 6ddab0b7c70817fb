"""The connector on a real store: what the step loop may rely on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from baton_engine.interface import PADDING
from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.markers import Index
from baton_kvstore.keys import marker_key
from baton_node.store.base import ChunkCopied, ChunkPublished, ChunksLookedUp
from baton_protocol.ids import BlockId, Epoch, NodeId, RequestId
from baton_protocol.policies import StoreCare
from baton_protocol.store import InboxEntry, Marker, Priority
from tests.support.nodes.connectors import PATIENCE_S, Harness, ref
from tests.support.stores.kvstore import PATIENT, frozen, patient_index, plain_client, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def harness(store: EmbeddedStore) -> Iterator[Harness]:
    harness = Harness(store, connect=patient_index, tuning=PATIENT)
    yield harness
    harness.connector.close()


def test_a_published_chunk_can_be_fetched_into_other_blocks(harness: Harness) -> None:
    for block in range(1, 5):
        harness.fill(block, block)
    marker = harness.publish(b"chunk", [1, 2, 3, 4])
    assert harness.fetch(b"chunk", marker, (9, 8, 7, 6)).bytes == 4 * harness.block_bytes
    assert [harness.read(block) for block in (9, 8, 7, 6)] == [{1}, {2}, {3}, {4}]


def test_the_source_blocks_are_released_before_the_chunk_is_published(harness: Harness) -> None:
    harness.put(b"chunk")
    harness.until(lambda: harness.last(ChunkPublished) is not None)
    assert [type(event) for event in harness.events] == [ChunkCopied, ChunkPublished]


def test_a_fetch_does_not_write_blocks_that_already_hold_kv(harness: Harness) -> None:
    for block in range(1, 5):
        harness.fill(block, block)
    harness.fill(11, 77)
    marker = harness.publish(b"chunk", [1, 2, 3, 4])
    assert harness.fetch(b"chunk", marker, [PADDING, PADDING, 12, 13]).ok
    assert [harness.read(block) for block in (11, 12, 13)] == [{77}, {3}, {4}]


@pytest.mark.parametrize("shards", [1, 2])
def test_each_head_shard_is_fetched_to_its_place_in_the_block(
    store: EmbeddedStore, shards: int
) -> None:
    with closing(
        Harness(store, SimSettings(chunk_blocks=4, num_blocks=32, kv_shards=shards))
    ) as harness:
        size = harness.block_bytes
        blocks = {block: bytes((block + i) % 251 for i in range(size)) for block in range(1, 5)}
        for block, data in blocks.items():
            for shard in range(shards):
                half = size // shards
                piece = memoryview(bytearray(data[shard * half : (shard + 1) * half]))
                harness.memory.write([BlockId(block)], piece, shard)
        marker = harness.publish(b"chunk")
        assert marker.shards == shards
        assert harness.fetch(b"chunk", marker, [PADDING, 12, 13, 14]).ok
        for block, target in ((2, 12), (3, 13), (4, 14)):
            assert harness.raw(target) == harness.raw(block)
        assert harness.read(11) == {0}


def test_a_lookup_finds_exactly_the_published_chunks(harness: Harness) -> None:
    marker = harness.publish(b"here", [1, 2, 3, 4])
    names = [ref(name).hash for name in (b"nowhere", b"here")]
    harness.connector.lookup(RequestId("r"), 3, names)
    harness.until(lambda: harness.last(ChunksLookedUp) is not None)
    assert harness.last(ChunksLookedUp) == ChunksLookedUp(RequestId("r"), 3, (None, marker))


def test_a_fetch_that_misses_drops_the_marker(harness: Harness, store: EmbeddedStore) -> None:
    marker = harness.publish(b"chunk")
    for url in store.data_urls:
        with plain_client(url) as client:
            client.flushall()
    assert not harness.fetch(b"chunk", marker, (5, 6, 7, 8)).ok
    wait_until(lambda: harness.look_up(b"chunk") == (None,), "the marker to be dropped")


@pytest.mark.parametrize(("care", "policy"), [("apply", "noeviction"), ("check", "allkeys-lru")])
def test_an_index_that_would_evict_markers_is_reconfigured_or_logged(
    care: StoreCare, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [text for text in caplog.messages if "maxmemory-policy" in text]

    with EmbeddedStore(64 << 20) as store, plain_client(store.index_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with caplog.at_level("INFO"), closing(Harness(store, care=care)):
            wait_until(lambda: bool(lines()), "the log line")
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == policy


def marker_ttl_ms(store: EmbeddedStore, harness: Harness, name: bytes) -> int:
    with plain_client(store.index_url) as client:
        key = marker_key(harness.engine.info.fingerprint, ref(name).hash)
        return int(client.pttl(key))


def test_a_fetch_refreshes_the_marker_s_ttl_and_a_lookup_does_not(
    harness: Harness, store: EmbeddedStore
) -> None:
    names = (b"fetched", b"declined", b"gone")
    markers = {name: harness.publish(name) for name in names}
    with plain_client(store.index_url) as client:
        for name in names:
            key = marker_key(harness.engine.info.fingerprint, ref(name).hash)
            assert client.pexpire(key, 60_000)
    for url in store.data_urls:
        with plain_client(url) as client:
            for key in client.scan_iter():
                if ref(b"gone").hash.hex().encode() in key:
                    client.delete(key)
    assert harness.look_up(*names) == tuple(markers.values())
    assert not harness.fetch(b"gone", markers[b"gone"], (5, 6, 7, 8)).ok
    assert harness.fetch(b"fetched", markers[b"fetched"], (5, 6, 7, 8)).ok
    wait_until(lambda: marker_ttl_ms(store, harness, b"fetched") > 60_000, "a refreshed marker")
    assert 0 < marker_ttl_ms(store, harness, b"declined") <= 60_000
    wait_until(lambda: marker_ttl_ms(store, harness, b"gone") < 0, "the marker to be dropped")


# --- order --------------------------------------------------------------------------------------


def keys_with(url: str, part: bytes) -> list[bytes]:
    with plain_client(url) as client:
        return [key for key in client.scan_iter() if part in key]


def is_published(harness: Harness) -> bool:
    """Return whether the chunk is published with a marker. If the connector gave it up because the
    machine is busy, its ChunkPublished has no marker."""
    event = harness.last(ChunkPublished)
    return event is not None and event.marker is not None


def test_no_marker_is_written_before_the_bytes_are_acknowledged(single: EmbeddedStore) -> None:
    with closing(Harness(single)) as harness:
        harness.publish(b"before")
        with frozen(single.pid("data0")):
            harness.put(b"chunk")
            harness.until(lambda: harness.last(ChunkCopied) is not None)
            assert keys_with(single.index_url, ref(b"chunk").hash.hex().encode()) == []
            assert not is_published(harness)
        assert harness.next(ChunkPublished).chunk == ref(b"chunk")


def test_a_chunk_is_not_published_before_its_marker_is_written(single: EmbeddedStore) -> None:
    with closing(Harness(single)) as harness:
        harness.publish(b"before")
        (data,) = single.data_urls
        with frozen(single.pid("index")):
            harness.put(b"chunk")
            name = ref(b"chunk").hash.hex().encode()
            wait_until(lambda: bool(keys_with(data, name)), "the chunk's value")
            harness.events += harness.connector.poll()
            assert not is_published(harness)


def test_the_marker_of_each_of_many_chunks_is_written_and_reported_once(
    harness: Harness,
) -> None:
    names = [b"%d" % number for number in range(64)]
    for name in names:
        harness.put(name)
    harness.until(lambda: sum(isinstance(e, ChunkPublished) for e in harness.events) == len(names))
    published = [event for event in harness.events if isinstance(event, ChunkPublished)]
    known = dict(zip(names, harness.look_up(*names), strict=True))
    assert {event.chunk.hash: event.marker for event in published} == {
        ref(name).hash: marker for name, marker in known.items()
    }
    assert None not in known.values()


def test_a_put_for_a_hand_off_overtakes_queued_write_behind_puts(
    single: EmbeddedStore,
) -> None:
    with closing(Harness(single)) as harness:
        harness.publish(b"before")
        with frozen(single.pid("data0")):
            for number in range(8):
                harness.put(b"behind %d" % number, priority=Priority.BEHIND)
            harness.until(lambda: harness.last(ChunkCopied) is not None)
            harness.put(b"hand-off")
        harness.until(lambda: sum(isinstance(e, ChunkPublished) for e in harness.events) == 9)
        order = [event.chunk for event in harness.events if isinstance(event, ChunkPublished)]
        # Puts that a thread has already started are not recalled, at most one per thread.
        assert order.index(ref(b"hand-off")) <= 2


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


def test_a_chunk_is_announced_while_the_step_loop_of_its_writer_is_in_a_step(
    store: EmbeddedStore, harness: Harness
) -> None:
    """A step may take longer than the transfer, so the announcement must not wait for its end."""
    names = (b"one", b"two")
    for name in names:
        harness.put(name, inbox=("decode", "e1"))

    async def read_inbox() -> list[InboxEntry]:
        ids: list[bytes] = []
        announced: list[InboxEntry] = []
        async with Index(store.index_url, "default") as index:
            while len(announced) < len(names):
                ids, entries = await index.read_inbox(NodeId("decode"), Epoch("e1"), ids, 1000)
                announced += entries
        return announced

    announced = asyncio.run(
        asyncio.wait_for(read_inbox(), PATIENCE_S)
    )  # without a poll of the connector
    published = [harness.next(ChunkPublished) for _ in names]
    assert sorted(entry.markers[0].stamp for entry in announced) == sorted(
        event.marker.stamp for event in published if event.marker is not None
    )
    assert {(entry.request, entry.attempt, entry.kind) for entry in announced} == {
        ("r", 1, "chunks")
    }


def test_lookups_and_puts_settle_although_the_store_is_down() -> None:
    with EmbeddedStore(64 << 20) as store:
        harness = Harness(store)
        with closing(harness.connector):
            store.stop()
            harness.connector.lookup(RequestId("r"), 1, [ref(b"x").hash, ref(b"y").hash])
            harness.until(lambda: harness.last(ChunksLookedUp) is not None)
            assert harness.last(ChunksLookedUp) == ChunksLookedUp(RequestId("r"), 1, (None, None))
            harness.put(b"x")
            harness.until(lambda: harness.last(ChunkPublished) is not None)
            assert harness.last(ChunkCopied) is not None
            event = harness.last(ChunkPublished)
            assert isinstance(event, ChunkPublished)
            assert event.marker is None
            assert event.reason


class BrokenAtFirst(Index):
    """An index whose first inbox read and first lookup raise an unexpected error."""

    reads, lookups = 0, 0

    async def read_inbox(self, *args: Any) -> tuple[list[bytes], list[InboxEntry]]:
        self.reads += 1
        if self.reads == 1:
            raise KeyError("unexpected")
        return await super().read_inbox(*args)

    async def lookup(self, *args: Any) -> list[Marker | None]:
        self.lookups += 1
        if self.lookups == 1:
            raise KeyError("unexpected")
        return await super().lookup(*args)


def test_an_unexpected_error_of_the_index_neither_stops_the_inbox_nor_loses_a_lookup(
    store: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(store, connect=BrokenAtFirst)
    with closing(harness.connector):
        harness.connector.lookup(RequestId("r"), 1, [ref(b"x").hash])
        harness.until(lambda: harness.last(ChunksLookedUp) is not None)
        assert harness.last(ChunksLookedUp) == ChunksLookedUp(RequestId("r"), 1, (None,))
        harness.connector.announce(("n0", "e0"), InboxEntry(RequestId("r"), 1, "end"))
        harness.until(lambda: harness.last(InboxEntry) is not None)
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"] * 2


def test_close_returns_with_transfers_in_flight_and_can_be_called_twice(harness: Harness) -> None:
    for number in range(20):
        harness.put(b"%d" % number)
    harness.connector.close()
    harness.connector.close()
