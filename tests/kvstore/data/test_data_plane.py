"""The data plane on healthy servers."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from baton_kvstore.data.chunk_format import HEADER_BYTES
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.rendezvous import rendezvous
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import StoreMisconfigured
from baton_kvstore.keys import chunk_key, ttl_ms
from baton_protocol.store import Priority
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    EPOCH,
    FINGERPRINT,
    LAYOUT,
    chunk_name,
    payload_of,
    plain_client,
    wait_until,
)

pytestmark = pytest.mark.integration

ONE = chunk_name(1)


def nothing(*_: object) -> None:
    pass


def test_a_chunk_is_fetched_as_it_was_put_byte_for_byte(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls)
    put = transfers.put(ONE, depth=4)
    assert put.ok
    assert put.bytes == LAYOUT.chunk_bytes
    assert put.marker is not None
    assert put.marker.run_id == transfers.plane.run_ids[0]
    assert (put.marker.payload_bytes, put.marker.shards, put.marker.depth) == (65536, 1, 4)
    result, payload = transfers.get(ONE, put.marker)
    assert (result.ok, result.reason, result.bytes) == (True, "", LAYOUT.chunk_bytes)
    assert payload == payload_of(ONE)


def test_the_same_chunk_put_twice_has_two_markers(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    """With equal markers, dropping the first as wrong would also drop the second."""
    transfers = make_transfers(single.data_urls)
    assert transfers.stored(ONE) != transfers.stored(ONE)


def test_a_chunk_is_stored_as_one_key_with_header_and_payload(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    make_transfers(single.data_urls).stored(ONE)
    with plain_client(single.data_urls[0]) as client:
        assert client.keys() == [chunk_key(FINGERPRINT, ONE)]
        value = client.get(chunk_key(FINGERPRINT, ONE))
    assert isinstance(value, bytes)
    assert value[HEADER_BYTES:] == payload_of(ONE)


def test_many_threads_transfer_many_chunks_without_mixing_them(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(store.data_urls, threads=3)
    names = [chunk_name(number) for number in range(240)]

    def round_trip(number: int) -> bool:
        mine = names[number::12]
        pending = [transfers.put_later(name, payload_of(name)) for name in mine]
        markers = [wait().marker for wait in pending]
        gets = [
            transfers.get_later(name, marker)
            for name, marker in zip(mine, markers, strict=True)
            if marker is not None
        ]
        return [get()[1] for get in gets] == [payload_of(name) for name in mine]

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(round_trip, range(12)))
    assert sorted(transfers.copied) == sorted(names)
    assert transfers.plane.put_bytes_per_s > 0
    assert transfers.plane.get_bytes_per_s > 0
    assert transfers.plane.queued == 0


def test_chunks_are_spread_over_instances_and_markers_name_the_right_one(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(store.data_urls)
    markers = [transfers.stored(chunk_name(number)) for number in range(90)]
    per_instance = Counter(marker.instance for marker in markers)
    for instance, url in enumerate(store.data_urls):
        with plain_client(url) as client:
            assert client.dbsize() == per_instance[instance] > 10


def test_a_new_instance_takes_its_share_and_moves_no_other_chunk() -> None:
    labels = ["redis://a:1", "redis://b:1", "redis://c:1"]
    names = [chunk_name(number) for number in range(4000)]
    before = [rendezvous(name, labels) for name in names]
    after = [rendezvous(name, [*labels, "redis://d:1"]) for name in names]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {3}
    assert 0.2 < len(moved) / len(names) < 0.3  # 1/4


def test_reads_follow_the_marker_after_an_instance_was_added(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    names = [chunk_name(number) for number in range(60)]
    few = make_transfers(store.data_urls[:2])
    markers = [few.stored(name) for name in names]
    more = make_transfers(store.data_urls)
    assert any(more.plane.instance_for(name) == 2 for name in names)
    for name, marker in zip(names, markers, strict=True):
        assert more.get(name, marker)[1] == payload_of(name)


def test_a_lifetime_falls_with_depth_and_a_hit_extends_it(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=Tuning(ttl_base_s=1000.0))
    depths = [0, 10, 200]
    markers = [transfers.stored(chunk_name(depth), depth=depth) for depth in depths]
    with plain_client(single.data_urls[0]) as client:
        left = [client.pttl(chunk_key(FINGERPRINT, chunk_name(depth))) for depth in depths]
        for depth, ttl in zip(depths, left, strict=True):
            assert ttl_ms(depth, 1000.0) - 30_000 < ttl <= ttl_ms(depth, 1000.0)
        assert left == sorted(left, reverse=True)
        client.pexpire(chunk_key(FINGERPRINT, chunk_name(10)), 60_000)
        assert transfers.get(chunk_name(10), markers[1], depth=10)[0].ok
        assert client.pttl(chunk_key(FINGERPRINT, chunk_name(10))) > 400_000


def test_the_source_is_released_before_the_put_is_done(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    plane = make_transfers(single.data_urls).plane
    calls: list[str] = []
    ended = threading.Event()

    def fill(view: memoryview, shard: int) -> None:
        calls.append("fill")

    def done(_: object) -> None:
        calls.append("done")
        ended.set()

    plane.submit_put(ONE, 16, 0, fill, lambda: calls.append("copied"), done)
    assert ended.wait(120)
    assert calls == ["fill", "copied", "done"]


def test_urgent_operations_overtake_others_and_submitting_never_blocks(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, threads=1)
    marker = transfers.stored(ONE)
    order: list[str] = []
    gate, ended = threading.Event(), threading.Event()

    def fill_slowly(*_: object) -> None:
        gate.wait(120)

    def record(name: str) -> None:
        order.append(name)
        if len(order) == 5:
            ended.set()

    def put(number: int, priority: Priority, name: str) -> None:
        chunk = chunk_name(number)
        plane.submit_put(chunk, 16, 0, nothing, nothing, lambda _: record(name), priority)

    plane = transfers.plane
    plane.submit_put(chunk_name(2), 16, 0, fill_slowly, nothing, lambda _: record("first put"))
    wait_until(lambda: plane.queued == 0, "the first put to begin")
    put(3, Priority.BEHIND, "behind")
    put(4, Priority.PREFIX, "prefix put")
    plane.submit_get(ONE, marker, 0, nothing, lambda _: record("prefix get"), Priority.PREFIX)
    put(5, Priority.HANDOFF, "hand-off put")
    assert plane.queued == 4
    gate.set()
    assert ended.wait(120)
    assert order == ["first put", "hand-off put", "prefix put", "prefix get", "behind"]


def test_the_number_of_staging_buffers_is_limited(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    two = 2 * (LAYOUT.chunk_bytes + HEADER_BYTES)
    plane = make_transfers(single.data_urls, threads=5, inflight=two).plane
    gate, ended = threading.Event(), threading.Event()
    filling: list[int] = []
    results: list[object] = []

    def fill(*_: object) -> None:
        filling.append(1)
        gate.wait(120)

    def done(result: object) -> None:
        results.append(result)
        if len(results) == 8:
            ended.set()

    for number in range(8):
        plane.submit_put(chunk_name(number), 16, 0, fill, nothing, done)
    wait_until(lambda: plane.queued == 3, "five threads to take five puts")
    assert len(filling) <= 2
    gate.set()
    assert ended.wait(120)
    assert len(filling) == 8


def test_an_invalid_layout_or_url_is_refused_at_once() -> None:
    with pytest.raises(StoreMisconfigured, match="no data URL"):
        DataPlane((), LAYOUT, FINGERPRINT, EPOCH)
    for shards in (0, 3, 8):
        sharded = msgspec.structs.replace(LAYOUT, kv_shards=shards)
        with pytest.raises(
            StoreMisconfigured, match=f"kv_shards is {shards}; give a divisor of the 4 KV heads"
        ):
            DataPlane(("unix:///x",), sharded, FINGERPRINT, EPOCH)


def test_connections_are_opened_before_the_first_transfer(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    plane = make_transfers(store.data_urls).plane
    assert plane.wait_connected(30)
    assert len(set(plane.run_ids)) == 3
    assert plane.troubles == ("", "", "")
