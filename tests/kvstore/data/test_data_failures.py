"""Damaged values and failing servers: operations fail with a reason, in time, and never deliver a
wrong byte."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from baton_kvstore.data.chunk_format import HEADER_BYTES
from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.instance import CLOSED
from baton_kvstore.data.transfers import GetResult, PutResult
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedServers, EmbeddedStore, ServerSpec
from baton_kvstore.keys import chunk_key
from baton_protocol.store import Marker
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    EPOCH,
    FINGERPRINT,
    LAYOUT,
    PATIENT,
    Transfers,
    chunk_name,
    payload_of,
    plain_client,
    wait_until,
)

pytestmark = pytest.mark.integration

ONE, TWO = chunk_name(1), chunk_name(2)
SHORT_DEADLINES = Tuning(deadline_base_s=0.3, connect_timeout_s=0.3, backoff_limit_s=0.2)
SHORT_BACKOFF = replace(PATIENT, backoff_limit_s=0.2)
MARKER = Marker(instance=0, run_id="r", payload_bytes=LAYOUT.chunk_bytes, shards=1, depth=0)


def key(number: int) -> bytes:
    return chunk_key(FINGERPRINT, chunk_name(number))


Change = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda value: value[:-1] + bytes([value[-1] ^ 1]), "checksum"),
        (lambda value: value[:-1], "corrupt: 65631 bytes, expected 65632"),
        (lambda value: value[:10], "corrupt: 10 bytes"),
        (lambda value: b"", "corrupt: 0 bytes"),
        (lambda value: value + b"x", "corrupt: 65633 bytes, expected 65632"),
        (lambda value: value[:HEADER_BYTES] + bytes(LAYOUT.chunk_bytes), "checksum"),
    ],
)
def test_a_damaged_value_is_a_miss_with_its_reason(
    single: EmbeddedStore, make_transfers: MakeTransfers, change: Change, expected: str
) -> None:
    transfers = make_transfers(single.data_urls)
    marker = transfers.stored(ONE)
    with plain_client(single.data_urls[0]) as client:
        value = client.get(key(1))
        assert isinstance(value, bytes)
        client.set(key(1), change(value))
    result, payload = transfers.get(ONE, marker)
    assert (result.ok, result.gone, payload) == (False, True, b"")
    assert expected in result.reason
    assert transfers.get(TWO, transfers.stored(TWO))[1] == payload_of(TWO)


def test_a_swapped_value_is_a_miss(single: EmbeddedStore, make_transfers: MakeTransfers) -> None:
    transfers = make_transfers(single.data_urls)
    markers = [transfers.stored(chunk_name(number)) for number in (1, 2)]
    with plain_client(single.data_urls[0]) as client:
        client.rename(key(2), key(1))
    result, payload = transfers.get(ONE, markers[0])
    assert (result.ok, result.gone, payload) == (False, True, b"")
    assert "chunk hash" in result.reason


def test_an_evicted_value_is_missing(single: EmbeddedStore, make_transfers: MakeTransfers) -> None:
    transfers = make_transfers(single.data_urls)
    marker = transfers.stored(ONE)
    with plain_client(single.data_urls[0]) as client:
        client.flushall()
    result, _ = transfers.get(ONE, marker)
    assert (result.ok, result.gone, result.reason) == (False, True, "missing")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"instance": 1}, "no data instance 1 among 1"),
        ({"instance": -1}, "no data instance -1"),
        ({"payload_bytes": 5}, "5 bytes in 1 shards"),
        ({"shards": 2}, "in 2 shards"),
        ({"run_id": "another"}, "restarted since"),
    ],
)
def test_an_impossible_marker_is_a_miss(
    single: EmbeddedStore, make_transfers: MakeTransfers, change: dict[str, object], expected: str
) -> None:
    transfers = make_transfers(single.data_urls)
    fields = {name: getattr(MARKER, name) for name in MARKER.__struct_fields__}
    result, payload = transfers.get(ONE, Marker(**(fields | change)))
    assert (result.ok, result.gone, payload) == (False, True, b"")
    assert expected in result.reason


def test_markers_from_before_a_servers_restart_are_misses(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=SHORT_BACKOFF)
    marker = transfers.stored(ONE)
    puts = [transfers.put_later(chunk_name(number), payload_of(ONE)) for number in range(100, 400)]
    os.kill(single.pid("data0"), signal.SIGKILL)
    assert all(put().ok != bool(put().reason) for put in puts)
    wait_until(lambda: transfers.put(TWO).ok, "the server to be back")
    result, _ = transfers.get(ONE, marker)
    assert (result.ok, result.gone) == (False, True)
    assert "restarted" in result.reason
    assert transfers.get(TWO, transfers.stored(TWO))[1] == payload_of(TWO)
    assert transfers.plane.run_ids[0] != marker.run_id


def _logged_in(client: redis.Redis) -> int:
    """Return the number of other connections that have completed their login."""
    commands = ("info", "set", "getex", "ping")  # a client sends these only after its login
    return sum(item["cmd"] in commands for item in client.client_list())


def test_no_operation_fails_because_an_idle_connection_died(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls)
    marker = transfers.stored(ONE)
    with plain_client(single.data_urls[0]) as client:
        wait_until(lambda: _logged_in(client) == 2, "both threads to be connected")
        for _ in range(3):
            client.client_kill_filter(_type="normal", skipme=True)
            assert transfers.get(ONE, marker)[1] == payload_of(ONE)
            assert transfers.put(TWO).ok


def test_a_marker_from_after_a_restart_is_not_a_miss_on_an_old_connection(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    reader = make_transfers(single.data_urls, threads=1)
    reader.stored(ONE)  # connects to the first start of the server
    os.kill(single.pid("data0"), signal.SIGKILL)
    writer = make_transfers(single.data_urls, tuning=SHORT_BACKOFF)
    marker = writer.stored_at_last(TWO)
    wait_until(lambda: not reader.plane.troubles[0], "the reader to notice")
    assert reader.get(TWO, marker)[1] == payload_of(TWO)


def test_operations_on_an_absent_server_fail_fast_and_succeed_once_it_starts(
    make_servers: Callable[..., EmbeddedServers], make_transfers: MakeTransfers
) -> None:
    servers = make_servers(ServerSpec("one", 64 << 20, "noeviction"))
    url, away = servers.url("one"), servers.folder / "away"
    (servers.folder / "one.sock").rename(away)
    transfers = make_transfers((url,), tuning=SHORT_BACKOFF)
    wait_until(lambda: bool(transfers.plane.troubles[0]), "the first connection to fail")
    assert not transfers.plane.wait_connected(0.01)
    results = [transfers.put(ONE) for _ in range(300)]  # 300 deadlines would be ten hours
    assert {result.ok for result in results} == {False}
    assert "data instance 0 is down: cannot reach Redis at unix://" in results[0].reason
    assert transfers.copied == [ONE] * 300
    result, _ = transfers.get(ONE, MARKER)
    assert (result.ok, result.gone) == (False, False)
    away.rename(servers.folder / "one.sock")
    wait_until(lambda: transfers.put(ONE).ok, "the instance to be used again")


def test_an_operation_on_a_frozen_server_fails_at_its_deadline(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=SHORT_DEADLINES)
    marker = transfers.stored_at_last(ONE)
    pid = single.pid("data0")
    os.kill(pid, signal.SIGSTOP)
    try:
        gets = [transfers.get_later(ONE, marker) for _ in range(20)]
        puts = [transfers.put_later(chunk_name(number), payload_of(ONE)) for number in range(20)]
        results: list[GetResult | PutResult] = [get()[0] for get in gets]
        results += [put() for put in puts]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not any(result.ok for result in results)
    assert any("did not answer in time" in result.reason for result in results)
    assert not any(isinstance(result, GetResult) and result.gone for result in results)
    wait_until(lambda: transfers.get(ONE, marker)[0].ok, "the server to be used again")


def test_closing_does_not_wait_for_a_frozen_server(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    patient = Tuning(deadline_base_s=200.0, connect_timeout_s=200.0, idle_check_s=200.0)
    transfers = make_transfers(single.data_urls, tuning=patient)
    marker = transfers.stored(ONE)
    with plain_client(single.data_urls[0]) as client:
        wait_until(lambda: _logged_in(client) == 2, "both threads to be connected")
    # One thread checks the server before its first operation, and would freeze in that check.
    wait_until(lambda: transfers.plane.instances()[0].used_bytes > 0, "the server to be checked")
    pid = single.pid("data0")
    os.kill(pid, signal.SIGSTOP)
    try:
        gets = [transfers.get_later(ONE, marker) for _ in range(10)]
        wait_until(lambda: transfers.plane.queued <= 8, "two gets to begin")
        transfers.plane.close()
        assert {get()[0].reason for get in gets} == {CLOSED}
    finally:
        os.kill(pid, signal.SIGCONT)
    assert transfers.put(TWO).reason == CLOSED
    assert transfers.copied[-1] == TWO
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]


def test_close_settles_the_operations_of_a_plane_that_never_started() -> None:
    plane = DataPlane(("unix:///nowhere",), LAYOUT, FINGERPRINT, EPOCH)
    transfers = Transfers(plane)
    put, get = transfers.put_later(ONE, b""), transfers.get_later(ONE, MARKER)
    plane.close()
    assert (put().reason, get()[0].reason) == (CLOSED, CLOSED)


def test_a_full_server_evicts_the_tails_of_chains_before_their_heads(
    make_servers: Callable[..., EmbeddedServers], make_transfers: MakeTransfers
) -> None:
    servers = make_servers(ServerSpec("small", 16 << 20, "volatile-ttl"))
    transfers = make_transfers((servers.url("small"),))
    numbers = range(300)  # 15 chains of 20 chunks, of which slightly more than half fit
    for number in numbers:
        assert transfers.put(chunk_name(number), depth=10 * (number % 20)).ok
    with plain_client(servers.url("small")) as client:
        kept = [number % 20 for number in numbers if client.exists(key(number))]
    assert 100 < len(kept) < 290
    lost = [depth for depth in range(20) for _ in range(15 - kept.count(depth))]
    assert sum(kept) / len(kept) + 4 < sum(lost) / len(lost)


def test_a_failing_callback_is_logged_and_affects_only_its_own_operation(
    single: EmbeddedStore, make_transfers: MakeTransfers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    transfers = make_transfers(single.data_urls, threads=1)
    marker = transfers.stored(ONE)
    puts: list[PutResult] = []
    gets: list[GetResult] = []

    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    transfers.plane.submit_put(TWO, 16, 0, explode, lambda: None, puts.append)
    transfers.plane.submit_get(ONE, marker, 0, explode, gets.append)
    transfers.plane.submit_get(ONE, marker, 0, lambda *_: None, explode)
    transfers.stored(chunk_name(3))  # the thread still works
    assert transfers.get(ONE, marker)[1] == payload_of(ONE)
    assert "boom" in puts[0].reason
    assert (gets[0].ok, gets[0].gone) == (False, False)
    assert "boom" in gets[0].reason


def test_an_operation_that_waits_too_long_in_the_queue_is_refused(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, threads=1, tuning=Tuning(queue_limit_s=1.0))
    assert transfers.plane.wait_connected(30)
    gate = threading.Event()
    done: list[PutResult] = []

    def fill_slowly(*_: object) -> None:
        gate.wait(120)

    transfers.plane.submit_put(ONE, 16, 0, fill_slowly, lambda: None, done.append)
    wait_until(lambda: transfers.plane.queued == 0, "the first put to begin")
    waiting = transfers.put_later(TWO, payload_of(TWO))
    threading.Timer(1.2, gate.set).start()
    assert "too slow" in waiting().reason
    assert done[0].ok


def test_the_reason_for_a_wrong_password_does_not_show_it(
    single: EmbeddedStore, make_transfers: MakeTransfers, caplog: pytest.LogCaptureFixture
) -> None:
    path = single.data_urls[0].removeprefix("unix://")
    with plain_client(single.data_urls[0]) as client:
        client.config_set("requirepass", "right")
    refused = make_transfers((f"unix://:wr0ng@{path}",))
    reason = refused.put(ONE).reason
    assert "WRONGPASS" in reason
    assert "wr0ng" not in reason + caplog.text
    allowed = make_transfers((f"unix://:right@{path}",))
    assert allowed.get(ONE, allowed.stored(ONE))[1] == payload_of(ONE)
