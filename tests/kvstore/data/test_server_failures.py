"""A data server that is down, frozen, restarted or full is noticed, avoided at once, and used
again when it recovers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import redis

from baton_kvstore.data.data_plane import DataPlane
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedServers, EmbeddedStore, ServerSpec
from baton_protocol.layout import KVLayout
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    EPOCH,
    FINGERPRINT,
    PATIENCE_S,
    PATIENT,
    Transfers,
    chunk_name,
    frozen,
    held_down,
    immortal_keys,
    payload_of,
    plain_client,
    wait_until,
)
from tests.support.stores.redis_builds import BUILDS, redis_server

pytestmark = pytest.mark.integration

ONE, TWO = chunk_name(1), chunk_name(2)
QUICK = Tuning(deadline_base_s=0.5, connect_timeout_s=0.5, backoff_limit_s=0.2, idle_check_s=0.05)
# For tests that freeze no server.
FREQUENT_CHECKS = replace(PATIENT, backoff_limit_s=0.2, idle_check_s=0.05)
MIB = 1 << 20
# 2 MiB per chunk: more than the smallest servers can hold.
WIDE = KVLayout(
    num_layers=16, num_kv_heads=4, head_dim=128, block_size=16, dtype="float32", chunk_blocks=2
)


def usable(transfers: Transfers) -> bool:
    return not any(transfers.plane.put_troubles)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_server_that_goes_down_and_returns_is_noticed_without_traffic(
    single: EmbeddedStore, make_transfers: MakeTransfers, caplog: pytest.LogCaptureFixture
) -> None:
    transfers = make_transfers(single.data_urls, tuning=FREQUENT_CHECKS)
    assert transfers.plane.wait_connected(PATIENCE_S)
    before = transfers.plane.run_ids
    with held_down(single, "data0"):
        wait_until(lambda: not usable(transfers), "the loss to be noticed")
        for number in range(20):
            assert not transfers.put(chunk_name(number)).ok
    wait_until(lambda: usable(transfers), "the return to be noticed")
    assert transfers.plane.run_ids != before
    wait_until(lambda: len(warnings(caplog)) == 2, "both warnings")
    lost, recovered = warnings(caplog)
    # The server's end closes a connection and then refuses the next; either may be seen first.
    reasons = ("cannot reach Redis at ", r"unix:\S+ closed the connection")
    assert re.match(rf"data instance 0 cannot be used: ({'|'.join(reasons)})", lost)
    assert recovered == "data instance 0 can be used again"


def test_a_restart_is_noticed_without_traffic(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=FREQUENT_CHECKS)
    assert transfers.plane.wait_connected(PATIENCE_S)
    before = transfers.plane.run_ids
    os.kill(single.pid("data0"), signal.SIGKILL)
    wait_until(lambda: transfers.plane.run_ids != before, "the new run id")


def test_a_server_that_freezes_and_resumes_is_noticed_without_traffic(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=QUICK)
    marker = transfers.stored_at_last(ONE)
    with frozen(single.pid("data0")):
        wait_until(lambda: not usable(transfers), "the freeze to be noticed")
    wait_until(lambda: usable(transfers), "the server to be used again")
    assert transfers.got_at_last(ONE, marker) == payload_of(ONE)


def test_late_replies_of_a_frozen_server_are_dropped(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=QUICK)
    marker = transfers.stored_at_last(ONE)
    arrived: list[bytes] = []
    settled: list[str] = []
    with frozen(single.pid("data0")):
        for _ in range(4):
            transfers.plane.submit_get(
                ONE,
                marker,
                0,
                lambda view, _: arrived.append(bytes(view)),
                lambda result: settled.append(result.reason),
            )
        wait_until(lambda: len(settled) == 4, "the four gets to settle")
    wait_until(lambda: usable(transfers), "the server to be used again")
    assert transfers.got_at_last(ONE, marker) == payload_of(ONE)
    assert all(settled)
    assert arrived == []


def test_chunks_are_put_on_the_instances_that_accept_them(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(store.data_urls, tuning=QUICK)
    assert transfers.plane.wait_connected(PATIENCE_S)
    names = [chunk_name(number) for number in range(30)]
    with frozen(store.pid("data1")):
        wait_until(lambda: not usable(transfers), "the freeze to be noticed")
        markers = [transfers.stored_at_last(name) for name in names]
        assert {marker.instance for marker in markers} == {0, 2}
        for name, marker in zip(names, markers, strict=True):
            assert transfers.got_at_last(name, marker) == payload_of(name)
    wait_until(lambda: usable(transfers), "the server to be used again")
    wait_until(
        lambda: {transfers.stored_at_last(name).instance for name in names} == {0, 1, 2},
        "chunks on all three instances",
    )


@pytest.mark.parametrize("build", BUILDS)
def test_a_full_server_refuses_puts_serves_gets_and_is_used_again_once_it_has_room(
    make_servers: Callable[..., EmbeddedServers],
    make_transfers: MakeTransfers,
    caplog: pytest.LogCaptureFixture,
    build: str,
) -> None:
    servers = make_servers(ServerSpec("tiny", 3 * MIB, "noeviction"), binary=redis_server(build))
    transfers = make_transfers((servers.url("tiny"),), tuning=FREQUENT_CHECKS)
    marker = transfers.stored(ONE)
    results = [transfers.put(chunk_name(number)) for number in range(2, 62)]
    assert "store full" in [result.reason for result in results]
    assert not results[-1].ok
    assert not usable(transfers)
    assert transfers.plane.troubles == ("",)
    assert transfers.get(ONE, marker)[1] == payload_of(ONE)
    assert "data instance 0 accepts no chunks: store full" in transfers.put(TWO).reason
    with plain_client(servers.url("tiny")) as client:
        refused = _refusals(client.info("errorstats"))
        wait_until(lambda: _refusals(client.info("errorstats")) > refused + 4, "refused probes")
        assert not usable(transfers)
        client.flushall()
    wait_until(lambda: usable(transfers), "the free memory to be noticed")
    assert transfers.put(TWO).ok
    wait_until(lambda: len(warnings(caplog)) == 2, "both warnings")
    assert warnings(caplog) == [
        "data instance 0 cannot be used: store full",
        "data instance 0 can be used again",
    ]
    assert immortal_keys(servers.url("tiny")) == []


def _refusals(info: dict[str, dict[str, int]]) -> int:
    return info.get("errorstat_OOM", {"count": 0})["count"]


def _wide(url: str) -> Transfers:
    plane = DataPlane((url,), WIDE, FINGERPRINT, EPOCH, tuning=FREQUENT_CHECKS)
    plane.start()
    return Transfers(plane, WIDE)


def _allow_large_client_buffers(url: str) -> None:
    """Turn off the limit of client buffers: the server would disconnect a large put."""
    with plain_client(url) as client, suppress(redis.ResponseError):
        client.config_set("maxmemory-clients", 0)


@pytest.mark.parametrize("build", BUILDS)
def test_a_server_with_room_for_only_one_chunk_stays_unused(
    make_servers: Callable[..., EmbeddedServers],
    make_transfers: MakeTransfers,
    caplog: pytest.LogCaptureFixture,
    build: str,
) -> None:
    servers = make_servers(ServerSpec("tiny", 64 * MIB, "noeviction"), binary=redis_server(build))
    _allow_large_client_buffers(servers.url("tiny"))
    transfers = make_transfers((servers.url("tiny"),), tuning=FREQUENT_CHECKS)
    with plain_client(servers.url("tiny")) as client:
        names = iter(chunk_name(number) for number in range(10_000))

        def leave_room_for(chunks: float) -> None:
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", int(used + chunks * transfers.layout.chunk_bytes))

        leave_room_for(0)
        wait_until(lambda: not transfers.put(next(names)).ok, "the server to be full")
        seen: set[bool] = set()
        leave_room_for(2)  # one chunk, and the buffers of a probe's connection
        refused = _refusals(client.info("errorstats"))
        wait_until(lambda: _refusals(client.info("errorstats")) > refused + 4, "refused probes")
        for _ in range(100):
            seen.add(usable(transfers))
            transfers.put(next(names))
        assert seen == {False}
        leave_room_for(20)
        wait_until(lambda: transfers.put(next(names)).ok, "the free memory to be noticed")
    wait_until(lambda: len(warnings(caplog)) == 2, "both warnings")


@pytest.mark.parametrize("build", BUILDS)
def test_a_chunk_larger_than_the_server_is_refused_until_the_server_is_larger(
    make_servers: Callable[..., EmbeddedServers], build: str
) -> None:
    servers = make_servers(ServerSpec("tiny", 2 * MIB, "volatile-ttl"), binary=redis_server(build))
    _allow_large_client_buffers(servers.url("tiny"))
    transfers = _wide(servers.url("tiny"))
    try:
        assert transfers.put(ONE).reason == "store full"
        with plain_client(servers.url("tiny")) as client:
            wait_until(lambda: _refusals(client.info("errorstats")) > 3, "probes to be refused")
            assert not usable(transfers)  # although the server would accept smaller values
            client.config_set("maxmemory", 64 * MIB)
        wait_until(lambda: usable(transfers), "the server to be used again")
        assert transfers.put(ONE).ok
    finally:
        transfers.plane.close()


def test_a_server_that_disconnects_on_a_put_stays_unused_until_it_accepts_one(
    make_servers: Callable[..., EmbeddedServers], caplog: pytest.LogCaptureFixture
) -> None:
    servers = make_servers(ServerSpec("strict", 64 * MIB, "volatile-ttl"))
    with plain_client(servers.url("strict")) as client:
        client.config_set("client-query-buffer-limit", MIB)
        transfers = _wide(servers.url("strict"))
        try:
            assert not transfers.put(ONE).ok
            assert not usable(transfers)
            opened = client.info("stats")["total_connections_received"]
            wait_until(
                lambda: client.info("stats")["total_connections_received"] > opened + 3,
                "probes to be dropped",
            )
            assert len(warnings(caplog)) == 1
            client.config_set("client-query-buffer-limit", 64 * MIB)
            wait_until(lambda: usable(transfers), "the server to be used again")
            assert transfers.put(ONE).ok
        finally:
            transfers.plane.close()
    wait_until(lambda: len(warnings(caplog)) == 2, "both warnings")


def test_only_operations_in_flight_wait_for_the_deadline_of_a_frozen_server(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=QUICK)
    transfers.stored_at_last(ONE)
    with frozen(single.pid("data0")):
        puts = [transfers.put_later(chunk_name(number), payload_of(ONE)) for number in range(1000)]
        # 500 deadlines one after the other (two threads) would exceed PATIENCE_S.
        assert not any(put().ok for put in puts)
        assert len(transfers.copied) == 1001
