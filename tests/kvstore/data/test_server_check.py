"""ServerCheck: the figures a node measures about its data servers, and the settings it applies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import redis

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.data.server_check import BUSY_CHECK_S, ServerCheck
from baton_kvstore.embedded.servers import EmbeddedServers, EmbeddedStore, ServerSpec
from baton_protocol.store import DataInstance
from tests.kvstore.conftest import MakeTransfers
from tests.support.clock import Clock
from tests.support.stores.kvstore import (
    PATIENT,
    chunk_name,
    frozen,
    payload_of,
    plain_client,
    shared_by_instances,
    wait_until,
)

pytestmark = pytest.mark.integration

ONE = chunk_name(1)
QUICK = replace(PATIENT, idle_check_s=0.02)
MIB = 1 << 20
MakeServers = Callable[..., EmbeddedServers]


def test_the_figures_of_an_unreachable_server_are_zero(make_transfers: MakeTransfers) -> None:
    plane = make_transfers(("unix:///nowhere",), tuning=QUICK).plane
    wait_until(lambda: bool(plane.troubles[0]), "the first attempt to fail")
    trouble = plane.troubles[0]
    assert plane.instances() == (DataInstance(trouble=trouble, put_trouble=trouble),)


def test_memory_and_round_trip_are_measured_without_traffic(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    plane = make_transfers(store.data_urls, tuning=QUICK).plane
    wait_until(
        lambda: all(each.used_bytes for each in plane.instances()), "the servers to be checked"
    )
    for each in plane.instances():
        assert each.limit_bytes == (256 * MIB) // 3
        assert 0 < each.get_latency_ms < 1000
        assert (each.evicted_keys, each.trouble) == (0, "")
        assert (each.put_bytes_per_s, each.get_bytes_per_s) == (0.0, 0.0)


def test_rates_are_measured_per_server(store: EmbeddedStore, make_transfers: MakeTransfers) -> None:
    transfers = make_transfers(store.data_urls, tuning=QUICK)
    marker = transfers.stored(ONE)
    assert transfers.get(ONE, marker)[0].ok
    plane = transfers.plane
    for number, each in enumerate(plane.instances()):
        here = number == marker.instance
        assert (each.put_bytes_per_s > 0, each.get_bytes_per_s > 0) == (here, here)
        if here:  # the two meters read the clock one after the other
            assert plane.put_bytes_per_s == pytest.approx(each.put_bytes_per_s, rel=0.5)
            assert plane.get_bytes_per_s == pytest.approx(each.get_bytes_per_s, rel=0.5)


def test_evictions_are_read_under_load_too(
    make_servers: MakeServers, make_transfers: MakeTransfers
) -> None:
    servers = make_servers(ServerSpec("small", 4 * MIB, "volatile-ttl"))
    transfers = make_transfers((servers.url("small"),), threads=1, tuning=QUICK)
    stop = threading.Event()
    numbers = iter(range(1_000_000))

    def keep_busy() -> None:
        while not stop.is_set():  # keep the queue filled
            pending = [
                transfers.put_later(chunk_name(next(numbers)), payload_of(ONE)) for _ in range(20)
            ]
            for put in pending:
                put()

    feeder = threading.Thread(target=keep_busy)
    feeder.start()
    try:
        plane = transfers.plane
        wait_until(lambda: plane.instances()[0].evicted_keys > 0, "evictions to be counted")
        assert plane.instances()[0].limit_bytes == 4 * MIB
    finally:
        stop.set()
        feeder.join()


def test_a_slow_reply_raises_the_latency(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    plane = make_transfers(single.data_urls, tuning=replace(PATIENT, idle_check_s=0.4)).plane
    # After the first check, the slow reply can only be the one to the next check's PING.
    wait_until(lambda: plane.instances()[0].limit_bytes > 0, "the first check")
    ended = threading.Event()
    with frozen(single.pid("data0")):
        ended.wait(1.2)
    # Each later check, 0.4 s apart, weighs a quarter in the average.
    wait_until(lambda: plane.instances()[0].get_latency_ms > 30, "the slow reply")


def test_a_busy_server_is_checked_less_often_and_no_thread_spins(
    single: EmbeddedStore,
) -> None:
    link = RespConnection(parse_endpoint(single.data_urls[0]))
    shared = shared_by_instances(idle_check_s=0.02)
    clock = Clock()
    check = ServerCheck(0, [link], shared, lambda: None, clock)
    check.reopen_link(link)
    first = check.next_check(link, idle=False)
    assert first is not None
    first(link)
    clock.advance(0.25)
    assert check.next_check(link, idle=True) == first
    assert check.pause_s(link, idle=True) == 0.0
    assert check.next_check(link, idle=False) is None
    assert check.pause_s(link, idle=False) == BUSY_CHECK_S - 0.25
    clock.advance(0.75)
    assert check.next_check(link, idle=False) == first
    link.close()


def test_a_server_that_refuses_ping_is_still_used(
    make_servers: MakeServers, make_transfers: MakeTransfers
) -> None:
    url = make_servers(ServerSpec("one", 64 * MIB, "volatile-ttl")).url("one")
    with plain_client(url) as admin:
        admin.acl_setuser("me", enabled=True, passwords=["+p"], keys=["*"], categories=["+@all"])
        transfers = make_transfers((url.replace("unix://", "unix://me:p@"),), tuning=QUICK)
        marker = transfers.stored(ONE)
        admin.execute_command("ACL", "SETUSER", "me", "-ping")
        before = _no_permission(admin)
        wait_until(lambda: _no_permission(admin) > before + 2, "some refused checks")
    assert transfers.plane.troubles == ("",)
    assert transfers.get(ONE, marker)[0].ok


def _no_permission(client: redis.Redis) -> int:
    return int(client.info("errorstats").get("errorstat_NOPERM", {"count": 0})["count"])


# --- the servers' settings ----------------------------------------------------------------------


def _policy(url: str) -> str:
    with plain_client(url) as client:
        return str(client.config_get("maxmemory-policy")["maxmemory-policy"])


def test_settings_are_applied_at_each_start_of_a_server(
    make_servers: MakeServers, make_transfers: MakeTransfers
) -> None:
    servers = make_servers(ServerSpec("one", 64 * MIB, "noeviction"))
    url = servers.url("one")
    make_transfers((url,), tuning=QUICK, settings="apply")
    wait_until(lambda: _policy(url) == "volatile-ttl", "the first start")
    with plain_client(url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.client_kill_filter(_type="normal", skipme=True)
        threading.Event().wait(0.2)  # time to reconnect to the same start of the server
        assert _policy(url) == "allkeys-lru"
    os.kill(servers.pid("one"), signal.SIGKILL)
    wait_until(lambda: _alive(url), "the second start")
    wait_until(lambda: _policy(url) == "volatile-ttl", "its settings")


def _alive(url: str) -> bool:
    with suppress(redis.RedisError):
        return _policy(url) != ""
    return False


@pytest.mark.parametrize("settings", ["check", None])
def test_settings_are_changed_only_in_apply_mode(
    make_servers: MakeServers,
    make_transfers: MakeTransfers,
    caplog: pytest.LogCaptureFixture,
    settings: str | None,
) -> None:
    servers = make_servers(ServerSpec("one", 64 * MIB, "noeviction"))
    transfers = make_transfers((servers.url("one"),), tuning=QUICK, settings=settings)
    assert transfers.get(ONE, transfers.stored(ONE))[1] == payload_of(ONE)
    assert _policy(servers.url("one")) == "noeviction"
    if settings is None:
        assert "maxmemory-policy" not in caplog.text
    else:
        wait_until(lambda: "maxmemory-policy" in caplog.text, "the warning")


def test_only_one_connection_applies_the_settings_of_a_server(
    make_servers: MakeServers, make_transfers: MakeTransfers, caplog: pytest.LogCaptureFixture
) -> None:
    servers = make_servers(ServerSpec("one", 64 * MIB, "noeviction"))
    transfers = make_transfers((servers.url("one"),), threads=4, tuning=QUICK, settings="check")
    with plain_client(servers.url("one")) as client:
        wait_until(lambda: len(client.client_list()) == 5, "all links")
    pending = [transfers.put_later(chunk_name(number), payload_of(ONE)) for number in range(100)]
    assert all(put().ok for put in pending)
    wait_until(lambda: "maxmemory-policy" in caplog.text, "the warning")
    assert len([line for line in caplog.messages if "maxmemory-policy" in line]) == 1
