"""Markers and inboxes on a real index."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import ServerRefused, StoreMisconfigured, StoreUnavailable
from baton_kvstore.index.markers import INBOX_BATCH, INBOX_TTL_S, Index
from baton_kvstore.index.registry import Registry
from baton_kvstore.keys import inbox_key, marker_key
from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.store import InboxEntry, Marker
from baton_protocol.wire import Codec
from tests.support.stores.kvstore import (
    EPOCH,
    FINGERPRINT,
    PATIENCE_S,
    chunk_name,
    frozen,
    held_down,
    immortal_keys,
    node_report,
    plain_client,
    wait_until,
)

pytestmark = pytest.mark.integration

NODE = NodeId("decode-1")
MARKER = Marker(instance=1, run_id="run", payload_bytes=100, shards=1, depth=2)


def entry(number: int) -> InboxEntry:
    return InboxEntry(
        request=RequestId(f"r{number}"), attempt=1, kind="chunks", first=number, markers=(MARKER,)
    )


@pytest.fixture
async def index(single: EmbeddedStore) -> AsyncIterator[Index]:
    async with Index(single.index_url, "pool", timeout_s=PATIENCE_S) as opened:
        await opened.ping()
        yield opened


async def test_a_lookup_returns_a_marker_or_none_for_each_chunk_in_order(index: Index) -> None:
    await index.mark_all(FINGERPRINT, [(chunk_name(2), MARKER, 60_000)])
    names = [chunk_name(number) for number in (1, 2, 3)]
    assert await index.lookup(FINGERPRINT, names) == [None, MARKER, None]
    assert await index.lookup(Fingerprint("other"), names) == [None, None, None]
    assert await index.lookup(FINGERPRINT, []) == []


async def test_a_long_prefix_takes_one_round_trip_to_mark_and_one_to_look_up(
    index: Index, single: EmbeddedStore
) -> None:
    names = [chunk_name(number) for number in range(512)]
    marks = [
        (name, Marker(depth % 3, "r" * 40, payload_bytes=1, shards=1, depth=depth), 60_000)
        for depth, name in enumerate(names)
    ]
    wanted = [marker if marker.depth % 5 else None for _, marker, _ in marks]
    await index.lookup(FINGERPRINT, names[:1])
    with plain_client(single.index_url) as client:
        client.config_resetstat()
        await index.mark_all(FINGERPRINT, [mark for mark in marks if mark[1].depth % 5])
        assert await index.lookup(FINGERPRINT, names) == wanted
        calls = client.info("commandstats")
    assert calls["cmdstat_mget"]["calls"] == 1
    assert calls["cmdstat_set"]["calls"] == 512 - 103
    await index.mark_all(FINGERPRINT, [])


async def test_a_marker_has_a_ttl_and_a_hit_extends_it(index: Index, single: EmbeddedStore) -> None:
    await index.mark_all(FINGERPRINT, [(chunk_name(1), MARKER, 60_000)])
    with plain_client(single.index_url) as client:
        assert 30_000 < client.pttl(marker_key(FINGERPRINT, chunk_name(1))) <= 60_000
        await index.refresh(FINGERPRINT, [(chunk_name(1), 600_000), (chunk_name(9), 1000)])
        assert client.pttl(marker_key(FINGERPRINT, chunk_name(1))) > 300_000
        assert not client.exists(marker_key(FINGERPRINT, chunk_name(9)))
    await index.refresh(FINGERPRINT, [])


async def test_a_wrong_marker_is_deleted_unless_it_was_replaced(index: Index) -> None:
    newer = Marker(instance=0, run_id="newer", payload_bytes=100, shards=1, depth=2)
    await index.mark_all(FINGERPRINT, [(chunk_name(1), newer, 60_000)])
    assert not await index.unmark(FINGERPRINT, chunk_name(1), MARKER)
    assert await index.lookup(FINGERPRINT, [chunk_name(1)]) == [newer]
    assert await index.unmark(FINGERPRINT, chunk_name(1), newer)
    assert await index.lookup(FINGERPRINT, [chunk_name(1)]) == [None]


async def test_a_marker_is_small_and_one_of_a_later_version_is_read(
    index: Index, single: EmbeddedStore
) -> None:
    full = Marker(1, "r" * 40, payload_bytes=4 << 20, shards=8, depth=500, stamp=(1 << 64) - 1)
    await index.mark_all(FINGERPRINT, [(chunk_name(1), full, 60_000)])
    with plain_client(single.index_url) as client:
        value = client.get(marker_key(FINGERPRINT, chunk_name(1)))
        assert len(value) <= 70  # the run id alone has 40 bytes
        version, fields = msgspec.msgpack.decode(value)
        later = msgspec.msgpack.encode([version, [*fields, "a field of a later version"]])
        client.set(marker_key(FINGERPRINT, chunk_name(2)), later)
    assert await index.lookup(FINGERPRINT, [chunk_name(1), chunk_name(2)]) == [full, full]


async def test_an_unreadable_marker_counts_as_missing_and_hides_no_other(
    index: Index, single: EmbeddedStore
) -> None:
    await index.mark_all(FINGERPRINT, [(chunk_name(2), MARKER, 60_000)])
    with plain_client(single.index_url) as client:
        client.set(marker_key(FINGERPRINT, chunk_name(1)), b"rubbish")
        client.set(marker_key(FINGERPRINT, chunk_name(3)), b"")
    names = [chunk_name(number) for number in (1, 2, 3)]
    assert await index.lookup(FINGERPRINT, names) == [None, MARKER, None]


async def test_an_inbox_keeps_its_order_over_many_reads(index: Index) -> None:
    entries = [entry(number) for number in range(INBOX_BATCH + 50)]
    for start in range(0, len(entries), 7):
        await index.announce(NODE, EPOCH, entries[start : start + 7])
    received: list[InboxEntry] = []
    ids: list[bytes] = []
    for _ in range(2):
        ids, batch = await index.read_inbox(NODE, EPOCH, ids, 1000)
        received += batch
    assert received == entries
    assert await index.read_inbox(NODE, EPOCH, ids, 10) == ([], [])


async def test_a_waiting_reader_gets_new_announcements(index: Index) -> None:
    reading = asyncio.create_task(index.read_inbox(NODE, EPOCH, (), 20_000))
    await asyncio.sleep(0.05)
    await index.announce(NODE, EPOCH, [entry(1)])
    _, entries = await asyncio.wait_for(reading, 120)
    assert entries == [entry(1)]


async def test_waiting_readers_do_not_block_lookups(index: Index) -> None:
    readers = [
        asyncio.create_task(index.read_inbox(NodeId(f"n{number}"), EPOCH, (), 3000))
        for number in range(2)
    ]
    for _ in range(50):
        await index.lookup(FINGERPRINT, [chunk_name(1)])
    assert not any(reader.done() for reader in readers)
    await index.announce(NodeId("n0"), EPOCH, [entry(1)])
    await index.announce(NodeId("n1"), EPOCH, [entry(2)])
    assert [(await reader)[1] for reader in readers] == [[entry(1)], [entry(2)]]


async def test_an_inbox_belongs_to_one_epoch_and_empty_announcements_create_none(
    index: Index, single: EmbeddedStore
) -> None:
    await index.announce(NODE, EPOCH, [entry(1)])
    assert (await index.read_inbox(NODE, Epoch("later"), (), 10))[1] == []
    await index.announce(NODE, Epoch("later"), [])
    with plain_client(single.index_url) as client:
        assert client.keys() == [inbox_key("pool", NODE, EPOCH)]


async def test_only_confirmed_entries_are_removed(index: Index, single: EmbeddedStore) -> None:
    key = inbox_key("pool", NODE, EPOCH)
    await index.announce(NODE, EPOCH, [entry(number) for number in range(20)])
    ids, _ = await index.read_inbox(NODE, EPOCH, (), 10)
    with plain_client(single.index_url) as client:
        assert client.xlen(key) == 20  # reading removes nothing: the reply might have been lost
        again, entries = await index.read_inbox(NODE, EPOCH, (), 10)
        assert (again, len(entries)) == (ids, 20)
        await index.announce(NODE, EPOCH, [entry(20)])
        _, entries = await index.read_inbox(NODE, EPOCH, ids, 10)
        assert entries == [entry(20)]
        assert client.xlen(key) == 1
        assert 0 < client.ttl(key) <= INBOX_TTL_S


async def test_a_reader_gets_entries_written_after_the_servers_clock_was_set_back(
    index: Index, single: EmbeddedStore
) -> None:
    await index.announce(NODE, EPOCH, [entry(1)])
    ids, _ = await index.read_inbox(NODE, EPOCH, (), 10)
    with plain_client(single.index_url) as client:
        key = inbox_key("pool", NODE, EPOCH)
        client.delete(key)  # as if it had expired, INBOX_TTL_S after the last announcement
        an_hour_ago = client.time()[0] - 3600
        encoded = Codec[InboxEntry](InboxEntry).encode(entry(2))
        client.xadd(key, {"e": encoded}, id=f"{an_hour_ago * 1000}-0")
    assert (await index.read_inbox(NODE, EPOCH, ids, 10))[1] == [entry(2)]


async def test_an_inbox_without_a_reader_is_trimmed_and_expires(single: EmbeddedStore) -> None:
    async with Index(single.index_url, "pool", timeout_s=10.0, inbox_entries=100) as index:
        await index.announce(NODE, EPOCH, [entry(number) for number in range(2000)])
        with plain_client(single.index_url) as client:
            # Redis trims a whole stream node at a time, so the length is approximate.
            assert client.xlen(inbox_key("pool", NODE, EPOCH)) < 400
            assert client.ttl(inbox_key("pool", NODE, EPOCH)) > 0
        await index.drop_inbox(NODE, EPOCH)
    with plain_client(single.index_url) as client:
        assert client.dbsize() == 0


async def test_an_unreadable_entry_is_skipped(index: Index, single: EmbeddedStore) -> None:
    with plain_client(single.index_url) as client:
        client.xadd(inbox_key("pool", NODE, EPOCH), {"e": b"rubbish"})
        client.xadd(inbox_key("pool", NODE, EPOCH), {"other": b"x"})
    await index.announce(NODE, EPOCH, [entry(1)])
    ids, entries = await index.read_inbox(NODE, EPOCH, (), 10)
    assert entries == [entry(1)]
    assert len(ids) == 3


async def test_a_lost_index_raises_store_unavailable_and_is_used_again_after_its_restart(
    index: Index, single: EmbeddedStore
) -> None:
    pid = single.pid("index")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StoreUnavailable, match="unix://"):
        await index.mark_all(FINGERPRINT, [(chunk_name(1), MARKER, 60_000)])
    wait_until(lambda: single.pid("index") != pid, "the index to be started again")
    for _ in range(2000):
        try:
            await index.mark_all(FINGERPRINT, [(chunk_name(1), MARKER, 60_000)])
            break
        except StoreUnavailable:
            await asyncio.sleep(0.05)
    assert await index.lookup(FINGERPRINT, [chunk_name(1)]) == [MARKER]
    assert (await index.read_inbox(NODE, EPOCH, [b"999-0"], 10))[1] == []


async def test_a_frozen_index_raises_store_unavailable_within_the_timeout(
    index: Index, single: EmbeddedStore
) -> None:
    await index.mark_all(FINGERPRINT, [(chunk_name(1), MARKER, 60_000)])
    async with Index(single.index_url, "pool") as client_index:

        async def retried(chunk: BlockHash) -> list[Marker | None]:
            """Retry the lookup: on a busy machine it may time out once more."""
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with suppress(StoreUnavailable):
                        return await client_index.lookup(FINGERPRINT, [chunk])

        assert await retried(chunk_name(1)) == [MARKER]
        with frozen(single.pid("index")):
            with pytest.raises(StoreUnavailable, match="did not answer in time"):
                await client_index.lookup(FINGERPRINT, [chunk_name(1)])
            with pytest.raises(StoreUnavailable, match="did not answer in time"):
                await client_index.read_inbox(NODE, EPOCH, (), 100)
        # The late reply must not be taken for the reply to the next request.
        assert await retried(chunk_name(2)) == [None]
        assert await retried(chunk_name(1)) == [MARKER]


async def test_an_index_logs_in_and_no_message_shows_the_password(single: EmbeddedStore) -> None:
    with plain_client(single.index_url) as client:
        client.config_set("requirepass", "right")
    path = single.index_url.removeprefix("unix://")
    async with Index(f"unix://:right@{path}", "pool") as allowed:
        assert await allowed.lookup(FINGERPRINT, [chunk_name(1)]) == [None]
    async with Index(f"unix://:wr0ng@{path}", "pool") as refused:
        with pytest.raises(StoreUnavailable) as caught:
            await refused.ping()
        assert "wr0ng" not in str(caught.value)


async def test_a_bad_url_is_refused_before_any_connection() -> None:
    with pytest.raises(StoreMisconfigured):
        Index("ftp://x", "pool")


async def test_a_thousand_concurrent_lookups_all_succeed(single: EmbeddedStore) -> None:
    async with Index(single.index_url, "pool", timeout_s=30.0) as index:
        await index.mark_all(FINGERPRINT, [(chunk_name(1), MARKER, 60_000)])
        answers = await asyncio.gather(
            *(index.lookup(FINGERPRINT, [chunk_name(1)]) for _ in range(1024))
        )
    assert answers == [[MARKER]] * 1024


async def test_a_thousand_callers_of_a_frozen_index_can_be_cancelled_at_once(
    single: EmbeddedStore,
) -> None:
    async def give_up_soon(index: Index) -> None:
        async with asyncio.timeout(0.05):
            await index.lookup(FINGERPRINT, [chunk_name(1)])

    # A caller that had to wait for the index would exceed the test's time limit.
    async with Index(single.index_url, "pool", timeout_s=1000.0) as index:
        await index.mark_all(FINGERPRINT, [(chunk_name(1), MARKER, 60_000)])
        with frozen(single.pid("index")):
            for _ in range(2):
                ends = await asyncio.gather(
                    *(give_up_soon(index) for _ in range(1024)), return_exceptions=True
                )
                assert {type(end) for end in ends} == {TimeoutError}
        answers = await asyncio.gather(
            *(index.lookup(FINGERPRINT, [chunk_name(1)]) for _ in range(20))
        )
    assert answers == [[MARKER]] * 20


async def test_closing_does_not_wait_for_a_frozen_index(single: EmbeddedStore) -> None:
    index = Index(single.index_url, "pool", timeout_s=1000.0)
    await index.ping()
    with frozen(single.pid("index")):
        client_index = asyncio.create_task(index.lookup(FINGERPRINT, [chunk_name(1)]))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(120):
            await index.close()
            client_index.cancel()
            await asyncio.wait([client_index])


async def test_a_full_index_refuses_writes_and_serves_reads(
    index: Index, single: EmbeddedStore
) -> None:
    await index.probe(NODE, EPOCH)
    await index.mark_all(FINGERPRINT, [(chunk_name(1), MARKER, 60_000)])
    with plain_client(single.index_url) as client:
        client.config_set("maxmemory", 1)
        for refused in (
            index.probe(NODE, EPOCH),
            index.mark_all(FINGERPRINT, [(chunk_name(2), MARKER, 60_000)]),
            index.announce(NODE, EPOCH, [entry(1), entry(2)]),
        ):
            with pytest.raises(ServerRefused) as caught:
                await refused
            assert caught.value.code == "OOM"
        assert await index.lookup(FINGERPRINT, [chunk_name(1)]) == [MARKER]
        assert (await index.read_inbox(NODE, EPOCH, (), 10))[1] == []
        client.config_set("maxmemory", 64 << 20)
    await index.probe(NODE, EPOCH)


async def test_only_a_restart_changes_the_run_id(index: Index, single: EmbeddedStore) -> None:
    before = await index.run_id()
    assert await index.run_id() == before
    with held_down(single, "index"):
        pass
    async with asyncio.timeout(120):
        while await _run_id(index) in ("", before):
            await asyncio.sleep(0.01)


async def _run_id(index: Index) -> str:
    try:
        return await index.run_id()
    except StoreUnavailable:
        return ""


async def test_every_key_of_an_index_has_a_ttl(index: Index, single: EmbeddedStore) -> None:
    await index.probe(NODE, EPOCH)
    await index.mark_all(FINGERPRINT, [(chunk_name(1), MARKER, 60_000)])
    await index.refresh(FINGERPRINT, [(chunk_name(1), 600_000)])
    await index.announce(NODE, EPOCH, [entry(number) for number in range(300)])
    ids, _ = await index.read_inbox(NODE, EPOCH, (), 10)
    await index.read_inbox(NODE, EPOCH, ids, 10)
    async with Registry(single.index_url, "pool") as registry:
        for name in ("a", "b"):
            await registry.register(node_report(name))
        await registry.nodes()
    with plain_client(single.index_url) as client:
        assert client.dbsize() == 6
    assert immortal_keys(single.index_url) == []
