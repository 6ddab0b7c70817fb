"""Chunks in head shards: each shard is one value, and a get needs all of them."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import msgspec
import pytest
import redis

from baton_kvstore.data.chunk_format import HEADER_BYTES, chunk_spec, fingerprint_digest, verify
from baton_kvstore.data.transfers import GetResult, PutResult
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_protocol.store import Marker
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    FINGERPRINT,
    LAYOUT,
    PATIENCE_S,
    chunk_name,
    payload_of,
    plain_client,
    wait_until,
)

pytestmark = pytest.mark.integration

ONE = chunk_name(1)
SHARDED = msgspec.structs.replace(LAYOUT, kv_shards=4)


def test_a_chunk_in_shards_is_fetched_as_it_was_put_byte_for_byte(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(store.data_urls, layout=SHARDED)
    names = [chunk_name(number) for number in range(40)]
    pending = [transfers.put_later(name, payload_of(name)) for name in names]
    markers = [put().marker for put in pending]
    for name, marker in zip(names, markers, strict=True):
        assert marker is not None
        assert (marker.payload_bytes, marker.shards) == (LAYOUT.chunk_bytes, 4)
        result, payload = transfers.get(name, marker)
        assert (result.ok, result.bytes, payload) == (True, LAYOUT.chunk_bytes, payload_of(name))
    assert sorted(transfers.copied) == sorted(names)


def test_each_shard_is_a_separate_value_and_all_are_on_one_instance(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(store.data_urls, layout=SHARDED)
    marker = transfers.stored(ONE)
    digest = fingerprint_digest(FINGERPRINT)
    size = SHARDED.shard_bytes
    for instance, url in enumerate(store.data_urls):
        with plain_client(url) as client:
            if instance != marker.instance:
                assert client.dbsize() == 0
                continue
            assert set(client.keys()) == {chunk_key(FINGERPRINT, ONE, n) for n in range(4)}
            for shard in range(4):
                value = client.get(chunk_key(FINGERPRINT, ONE, shard))
                assert isinstance(value, bytes)
                spec = chunk_spec(SHARDED, digest, ONE, shard=shard)
                assert verify([memoryview(value)], spec) == ""
                assert value[HEADER_BYTES:] == payload_of(ONE)[shard * size : (shard + 1) * size]


def test_the_source_is_released_once_after_the_last_shard_is_staged(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    plane = make_transfers(single.data_urls, layout=SHARDED).plane
    calls: list[object] = []
    ended = threading.Event()

    def done(result: PutResult) -> None:
        calls.append(result.ok)
        ended.set()

    plane.submit_put(
        ONE,
        16,
        0,
        lambda view, shard: calls.append((shard, len(view))),
        lambda: calls.append("copied"),
        done,
    )
    assert ended.wait(PATIENCE_S)
    size = SHARDED.shard_bytes
    assert calls == [(0, size), (1, size), (2, size), (3, size), "copied", True]


@pytest.mark.parametrize("shard", range(4))
@pytest.mark.parametrize("damage", ["gone", "flipped", "another shard's"])
def test_one_bad_shard_is_a_miss_and_its_bytes_do_not_reach_the_sink(
    single: EmbeddedStore, make_transfers: MakeTransfers, shard: int, damage: str
) -> None:
    transfers = make_transfers(single.data_urls, layout=SHARDED)
    marker = transfers.stored(ONE)
    key = chunk_key(FINGERPRINT, ONE, shard)
    with plain_client(single.data_urls[0]) as client:
        if damage == "gone":
            client.delete(key)
        elif damage == "flipped":
            client.setrange(key, HEADER_BYTES + 5, b"\xff\x00\xff")
        else:
            other = client.get(chunk_key(FINGERPRINT, ONE, (shard + 1) % 4))
            assert isinstance(other, bytes)
            client.set(key, other)
    size = SHARDED.shard_bytes
    seen: list[int] = []
    ended: list[GetResult] = []

    def sink(view: memoryview, number: int) -> None:
        assert view == payload_of(ONE)[number * size : (number + 1) * size]
        seen.append(number)

    transfers.plane.submit_get(ONE, marker, 0, sink, ended.append)
    wait_until(lambda: bool(ended), "the get")
    assert (ended[0].ok, ended[0].gone, ended[0].bytes) == (False, True, 0)
    assert seen == list(range(shard))


def test_a_marker_of_another_number_of_shards_is_a_miss(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    marker = make_transfers(single.data_urls, layout=LAYOUT).stored(ONE)
    result, payload = make_transfers(single.data_urls, layout=SHARDED).get(ONE, marker)
    assert (result.ok, result.gone, payload) == (False, True, b"")
    assert "bytes in 1 shards" in result.reason


def test_a_server_restarted_between_two_shards_gives_no_marker(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, layout=SHARDED, threads=1)
    transfers.stored(chunk_name(2))
    before = transfers.plane.run_ids[0]
    results: list[PutResult] = []
    copied: list[int] = []

    def fill(view: memoryview, shard: int) -> None:
        if shard == 2:
            pid = single.pid("data0")
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: _is_restarted(single, pid), "the next server")

    transfers.plane.submit_put(ONE, 16, 0, fill, lambda: copied.append(1), results.append)
    wait_until(lambda: bool(results), "the put")
    assert results[0].marker is None
    assert "restarted between two shards" in results[0].reason
    assert copied == [1]
    assert transfers.plane.run_ids[0] != before


def _is_restarted(store: EmbeddedStore, pid: int) -> bool:
    if store.pid("data0") == pid:
        return False
    with plain_client(store.data_urls[0]) as client, suppress(redis.RedisError):
        return bool(client.ping())
    return False


def test_the_first_failed_shard_ends_a_put_and_frees_its_source(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, layout=SHARDED)
    filled: list[int] = []
    results: list[PutResult] = []
    copied: list[int] = []

    def fill(view: memoryview, shard: int) -> None:
        filled.append(shard)
        if shard == 1:
            raise RuntimeError("boom")

    transfers.plane.submit_put(ONE, 16, 0, fill, lambda: copied.append(1), results.append)
    wait_until(lambda: bool(results), "the put")
    assert "boom" in results[0].reason
    assert (filled, copied, len(results)) == ([0, 1], [1], 1)
    marker = Marker(0, transfers.plane.run_ids[0], LAYOUT.chunk_bytes, 4, 0)
    assert transfers.get(ONE, marker)[0].gone
