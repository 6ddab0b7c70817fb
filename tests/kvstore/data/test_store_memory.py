"""The limit of the store's memory holds, and the least useful chunks are evicted first."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.connection.server_settings import tend
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.keys import chunk_key
from baton_protocol.layout import KVLayout
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    FINGERPRINT,
    PATIENCE_S,
    chunk_name,
    payload_of,
    plain_client,
    wait_until,
)
from tests.support.stores.redis_builds import BUILDS, redis_server

pytestmark = pytest.mark.integration

MIB = 1 << 20
BOUND = 32 * MIB
# 1 MiB per chunk, the worst size: with a header the allocator takes a quarter more.
LAYOUT = KVLayout(
    num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, dtype="float32", chunk_blocks=1
)
# Memory of the process beyond the limit: the program, buffers of two threads, allocator overhead.
SLACK = 1.25
PROGRAM = 20 * MIB


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("build", BUILDS)
def test_a_server_that_gets_three_times_its_limit_stays_within_it(
    build: str, instances: int, make_transfers: MakeTransfers
) -> None:
    with EmbeddedStore(BOUND, data_instances=instances, binary=redis_server(build)) as store:
        transfers = make_transfers(store.data_urls, layout=LAYOUT, settings="apply")
        servers = [psutil.Process(store.pid(f"data{number}")) for number in range(instances)]
        for number in range(3 * BOUND // LAYOUT.chunk_bytes):
            result = transfers.put(chunk_name(number), bytes(LAYOUT.chunk_bytes), depth=number % 16)
            assert result.ok, result.reason
            used = used_memory(store)
            assert used <= BOUND
            resident = sum(server.memory_info().rss for server in servers)
            assert resident <= SLACK * BOUND + PROGRAM * instances
        assert used > BOUND / 2  # the server uses its memory instead of refusing puts


@pytest.mark.parametrize("build", BUILDS)
def test_a_chain_that_does_not_fit_loses_its_tail_and_keeps_its_head(
    build: str, make_transfers: MakeTransfers
) -> None:
    with EmbeddedStore(BOUND, binary=redis_server(build)) as store:
        transfers = make_transfers(store.data_urls, layout=LAYOUT)
        length = 3 * BOUND // LAYOUT.chunk_bytes
        for depth in range(length):
            assert transfers.put(chunk_name(depth), bytes(LAYOUT.chunk_bytes), depth=depth).ok
        with plain_client(store.data_urls[0]) as client:
            left = [
                depth
                for depth in range(length)
                if client.exists(chunk_key(FINGERPRINT, chunk_name(depth)))
            ]
    whole = next(depth for depth in range(length) if depth not in left)
    # The server samples ten keys per eviction, so some deep chunks survive.
    assert whole > len(left) / 2
    assert len(left) < length / 2


def test_chunks_that_are_read_outlive_newer_chunks_that_are_not(
    make_transfers: MakeTransfers,
) -> None:
    with EmbeddedStore(BOUND) as store:
        transfers = make_transfers(store.data_urls, layout=LAYOUT)
        markers = [transfers.stored(chunk_name(number)) for number in range(4)]
        unread = transfers.stored(chunk_name(99))
        for number in range(100, 100 + 3 * BOUND // LAYOUT.chunk_bytes):
            assert transfers.put(chunk_name(number), bytes(LAYOUT.chunk_bytes)).ok
            read = chunk_name(number % 4)
            result, payload = transfers.get(read, markers[number % 4])
            assert result.ok, result.reason
            assert payload == payload_of(read, LAYOUT)
        assert transfers.get(chunk_name(99), unread)[0].reason == "missing"


@pytest.mark.parametrize(("memory", "limit"), [(1279 * MIB, "0"), (1280 * MIB, "50%")])
def test_the_limit_of_all_client_buffers_is_set_only_if_64_clients_fit_in_half_the_memory(
    memory: int, limit: str
) -> None:
    with (
        EmbeddedStore(memory, binary=redis_server("debian")) as store,
        plain_client(store.data_urls[0]) as client,
    ):
        assert client.config_get("maxmemory-clients")["maxmemory-clients"] == limit


def test_a_small_store_takes_large_values_from_many_clients_and_disconnects_none() -> None:
    links, each, value = 32, 4, bytes(4 * MIB)
    with EmbeddedStore(512 * MIB, binary=redis_server("debian")) as store:
        url = store.data_urls[0]
        together = threading.Barrier(links)

        def put_and_get(number: int) -> int:
            link = RespConnection(parse_endpoint(url))
            into, deadline = [memoryview(bytearray(len(value)))], time.monotonic() + PATIENCE_S
            link.open(deadline)
            if number == 0:
                tend(link, deadline, "data", "apply", len(value))
            together.wait(PATIENCE_S)
            hits = 0
            for turn in range(each):
                link.put(deadline, b"key %d %d" % (number, turn), [memoryview(value)], 600_000)
                # The neighbour's key may not be written yet, or already be evicted.
                key = b"key %d %d" % ((number + 1) % links, turn)
                hits += link.get(deadline, key, into, 600_000) == len(value)
            together.wait(PATIENCE_S)
            link.close()
            return hits

        with ThreadPoolExecutor(links) as pool:
            hits = sum(pool.map(put_and_get, range(links)))
        with plain_client(url) as client:
            assert client.info("stats")["evicted_clients"] == 0
    assert hits > links


@pytest.mark.parametrize("build", BUILDS)
def test_a_value_of_16_mib_is_put_and_read(build: str, make_transfers: MakeTransfers) -> None:
    big = msgspec.structs.replace(LAYOUT, chunk_blocks=16)
    with EmbeddedStore(512 * MIB, binary=redis_server(build)) as store:
        transfers = make_transfers(store.data_urls, layout=big, settings="apply")
        payload = bytes(big.chunk_bytes)
        put = transfers.put(chunk_name(1), payload)
        assert put.marker is not None, put.reason
        result, got = transfers.get(chunk_name(1), put.marker)
        assert result.ok, result.reason
        assert got == payload


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("build", BUILDS)
def test_a_client_that_does_not_read_evicts_no_chunks_unless_limits_are_off(
    build: str, bounded: bool
) -> None:
    with EmbeddedStore(2 * BOUND, binary=redis_server(build)) as store:
        url = store.data_urls[0]
        fill(url, 30)
        with plain_client(url) as client:
            if not bounded:
                client.config_set("client-output-buffer-limit", "normal 0 0 0")
                if client.config_get("maxmemory-clients"):
                    client.config_set("maxmemory-clients", "0")
        send_gets_and_read_no_reply(url, 100)
        with plain_client(url) as client:
            assert (client.dbsize() == 30) == bounded
            assert (client.info("stats")["evicted_keys"] == 0) == bounded


def used_memory(store: EmbeddedStore) -> int:
    total = 0
    for url in store.data_urls:
        with plain_client(url) as client:
            total += client.info("memory")["used_memory"]
    return total


def fill(url: str, values: int) -> None:
    connection = RespConnection(parse_endpoint(url))
    deadline = time.monotonic() + PATIENCE_S
    connection.open(deadline)
    for number in range(values):
        connection.put(deadline, b"key %d" % number, [memoryview(bytes(MIB))], 600_000)
    connection.close()


def send_gets_and_read_no_reply(url: str, values: int) -> None:
    """Send gets without reading a reply, until the server has answered all of them or has
    disconnected the client."""

    def is_over() -> bool:
        with plain_client(url) as client:
            answered = client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]
            return answered == values or "stalled" not in {
                one["name"] for one in client.client_list()
            }

    with socket.socket(socket.AF_UNIX) as stalled:
        stalled.connect(parse_endpoint(url).path)
        stalled.sendall(b"CLIENT SETNAME stalled\r\n")
        assert stalled.recv(100) == b"+OK\r\n"
        stalled.sendall(b"".join(b'GET "key %d"\r\n' % (number % 30) for number in range(values)))
        wait_until(is_over, "the last reply or the disconnection")
