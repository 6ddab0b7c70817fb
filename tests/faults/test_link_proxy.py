"""The LinkProxy, which fault tests put between nodes and a store, injects the faults it names."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import redis

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.embedded.servers import EmbeddedStore
from tests.support.wires.link_proxy import LinkProxy
from tests.support.wires.wire import WireLoop

VALUE = b"v" * (256 << 10)
SHORT_S = 1.0
LONG_S = 60.0


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore(64 << 20) as store:
        yield store


@pytest.fixture(scope="module")
def loop() -> Iterator[WireLoop]:
    loop = WireLoop()
    yield loop
    loop.close()


@pytest.fixture
def link(store: EmbeddedStore, loop: WireLoop) -> Iterator[LinkProxy]:
    link = LinkProxy(loop, store.url("data0"))
    yield link
    link.close()


@pytest.fixture
def client(link: LinkProxy) -> Iterator[redis.Redis]:
    """A client that does not retry."""
    with redis.Redis.from_url(link.url, socket_timeout=LONG_S, retry=None) as client:
        client.set("key", VALUE)
        yield client


def test_a_repaired_link_carries_every_byte(link: LinkProxy, client: redis.Redis) -> None:
    client.connection_pool.disconnect()
    link.refuse()
    link.mend()
    assert client.get("key") == VALUE
    assert min(link.passed["up"], link.passed["down"]) > len(VALUE) / 2


def test_a_slow_link_limits_the_transfer_rate(link: LinkProxy, client: redis.Redis) -> None:
    link.slow(1 << 20)
    with redis.Redis.from_url(link.url, socket_timeout=LONG_S) as patient:
        began = time.monotonic()
        assert patient.get("key") == VALUE
        assert time.monotonic() - began > len(VALUE) / (1 << 20) * 0.9


def test_a_held_link_neither_answers_nor_refuses(link: LinkProxy, client: redis.Redis) -> None:
    link.hold()
    impatient = redis.Redis.from_url(link.url, socket_timeout=SHORT_S, retry=None)
    with impatient, pytest.raises(redis.TimeoutError):
        impatient.get("key")
    link.mend()
    assert client.get("key") == VALUE


def test_a_cut_resets_open_connections_and_accepts_new_ones(
    link: LinkProxy, client: redis.Redis
) -> None:
    endpoint = parse_endpoint(link.url)
    with socket.create_connection((endpoint.host, endpoint.port), timeout=LONG_S) as before:
        before.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert before.recv(64) == b"+PONG\r\n"
        link.cut()
        with pytest.raises(ConnectionResetError):
            before.recv(64)
    client.connection_pool.disconnect()
    assert client.get("key") == VALUE


def test_a_refusing_link_also_resets_new_connections(link: LinkProxy, client: redis.Redis) -> None:
    link.refuse()
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.get("key")


def test_a_lossy_link_breaks_in_the_middle_of_a_value(link: LinkProxy, client: redis.Redis) -> None:
    link.lossy(len(VALUE) // 4, "cut", seed="test")
    before, broken = link.passed["down"], 0
    for _ in range(20):
        try:
            assert client.get("key") == VALUE
        except redis.ConnectionError:
            broken += 1
    assert broken > 10
    assert link.mishaps["cut"] >= broken
    assert link.passed["down"] - before > len(VALUE) / 4


def test_a_flip_changes_exactly_one_bit(link: LinkProxy, client: redis.Redis) -> None:
    link.lossy(len(VALUE) * 4 // 5, "flip", seed="test")
    value = client.get("key")
    assert isinstance(value, bytes)
    changed = int.from_bytes(value, "big") ^ int.from_bytes(VALUE, "big")
    assert 0 < changed.bit_count() == link.mishaps["flip"]
