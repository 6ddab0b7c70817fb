"""The limit of write-behind: its rate, and the conditions that stop it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from baton_kvstore.data.tuning import Tuning
from baton_kvstore.data.write_behind_budget import (
    SHARE,
    UNMEASURED_BYTES_PER_S,
    TokenBucket,
    WriteBehindBudget,
)
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_protocol.store import Priority
from tests.kvstore.conftest import MakeTransfers
from tests.support.clock import Clock
from tests.support.stores.kvstore import (
    LAYOUT,
    PATIENCE_S,
    PATIENT,
    Transfers,
    chunk_name,
    frozen,
    payload_of,
    plain_client,
    wait_until,
)

MIB = 1 << 20
QUICK = Tuning(deadline_base_s=0.5, connect_timeout_s=0.5, idle_check_s=0.02)
FREQUENT_CHECKS = replace(PATIENT, idle_check_s=0.02)


def taken(
    behind: WriteBehindBudget,
    put_bytes_per_s: float = 0.0,
    *,
    fullest: float = 0.0,
    others: bool = False,
) -> bool:
    """Take 1 MiB from the budget; return whether it had that much."""
    return behind.take(MIB, put_bytes_per_s=put_bytes_per_s, fullest=fullest, others=others)


@pytest.mark.parametrize("size", [64 << 10, MIB, 5 * MIB])
def test_a_rate_holds_on_average_for_chunks_of_any_size(size: int) -> None:
    clock = Clock()
    bucket = TokenBucket(clock)
    moved = 0
    for _ in range(10_000):
        clock.advance(0.01)
        while bucket.take(size, 10.0 * MIB):
            moved += size
    assert 100 * 10.0 * MIB - size <= moved <= 100 * 10.0 * MIB + size


def test_idle_time_saves_up_at_most_a_second() -> None:
    clock = Clock()
    bucket = TokenBucket(clock)
    clock.advance(1000.0)
    assert sum(bucket.take(MIB, 10.0 * MIB) for _ in range(100)) == 10


def test_a_rate_of_zero_lets_nothing_through() -> None:
    clock = Clock()
    bucket = TokenBucket(clock)
    clock.advance(1000.0)
    assert not bucket.take(1, 0.0)


def test_the_default_rate_is_a_tenth_of_the_put_rate() -> None:
    clock = Clock()
    behind = WriteBehindBudget(None, clock)
    moved = 0
    for _ in range(1000):
        clock.advance(0.1)
        moved += MIB * taken(behind, put_bytes_per_s=50.0 * MIB)
    assert moved == pytest.approx(100.0 * SHARE * 50.0 * MIB, rel=0.01)


def test_a_slow_link_is_assumed_until_a_put_has_measured_it() -> None:
    clock = Clock()
    behind = WriteBehindBudget(None, clock)
    moved = 0
    for _ in range(1000):
        clock.advance(0.1)
        moved += MIB * taken(behind)
    assert moved == pytest.approx(100.0 * SHARE * UNMEASURED_BYTES_PER_S, rel=0.02)


def test_a_configured_rate_needs_no_measurement_and_zero_is_off() -> None:
    clock = Clock()
    given, off = WriteBehindBudget(MIB, clock), WriteBehindBudget(0, clock)
    clock.advance(1.0)
    assert taken(given)
    assert not taken(off, put_bytes_per_s=1e9)


@pytest.mark.parametrize(("fullest", "others"), [(0.0, True), (0.51, False)])
def test_nothing_passes_while_other_puts_wait_or_a_server_is_over_half_full(
    fullest: float, others: bool
) -> None:
    clock = Clock()
    behind = WriteBehindBudget(MIB, clock)
    clock.advance(1.0)
    assert not taken(behind, fullest=fullest, others=others)
    assert taken(behind, fullest=0.5)


# --- on a data plane ----------------------------------------------------------------------------


def unlimited(
    make_transfers: MakeTransfers,
    store: EmbeddedStore,
    threads: int = 2,
    tuning: Tuning = FREQUENT_CHECKS,
) -> Transfers:
    """Return transfers whose write-behind is limited only by the state of the servers."""
    transfers = make_transfers(
        store.data_urls, tuning=tuning, threads=threads, write_behind_bandwidth=1e15
    )
    assert transfers.plane.wait_connected(PATIENCE_S)
    wait_until(
        lambda: all(each.limit_bytes for each in transfers.plane.instances()),
        "the limits of the servers",
    )
    return transfers


@pytest.mark.integration
def test_write_behind_stops_while_the_store_is_over_half_full(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    plane = unlimited(make_transfers, store).plane
    assert plane.take_behind(LAYOUT.chunk_bytes)
    with plain_client(store.data_urls[1]) as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.5))
        wait_until(lambda: not plane.take_behind(LAYOUT.chunk_bytes), "the fill to be noticed")
        client.config_set("maxmemory", 0)
        wait_until(lambda: plane.take_behind(LAYOUT.chunk_bytes), "the new limit to be noticed")


@pytest.mark.integration
def test_a_server_in_trouble_stops_write_behind_except_in_a_drain(
    store: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    plane = unlimited(make_transfers, store, tuning=QUICK).plane
    with frozen(store.pid("data1")):
        wait_until(lambda: bool(plane.troubles[1]), "the trouble to be noticed")
        seen = plane.instances()[1]
        assert seen.trouble == seen.put_trouble == plane.troubles[1]
        assert not plane.take_behind(LAYOUT.chunk_bytes)
        plane.draining = True
        assert plane.take_behind(LAYOUT.chunk_bytes)


@pytest.mark.integration
def test_a_new_data_plane_writes_behind_by_default(
    make_transfers: MakeTransfers,
) -> None:
    with EmbeddedStore(64 << 20) as store:
        transfers = make_transfers(store.data_urls, tuning=FREQUENT_CHECKS)
        assert transfers.plane.wait_connected(PATIENCE_S)
        assert transfers.plane.put_bytes_per_s == 0.0
        wait_until(lambda: transfers.plane.take_behind(LAYOUT.chunk_bytes), "write-behind to start")


@pytest.mark.integration
def test_a_full_server_is_in_trouble_for_puts_only(make_transfers: MakeTransfers) -> None:
    with EmbeddedStore(64 << 20) as store, plain_client(store.data_urls[0]) as client:
        transfers = unlimited(make_transfers, store)
        marker = transfers.stored(chunk_name(1))
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        assert not transfers.put(chunk_name(2)).ok
        (seen,) = transfers.plane.instances()
        assert (seen.trouble, bool(seen.put_trouble)) == ("", True)
        assert not transfers.plane.take_behind(LAYOUT.chunk_bytes)
        assert transfers.get(chunk_name(1), marker)[0].ok


@pytest.mark.integration
def test_write_behind_waits_for_other_queued_puts_and_not_for_its_own(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = unlimited(make_transfers, single, threads=1)
    plane = transfers.plane
    gate = threading.Event()

    def fill_slowly(*_: object) -> None:
        gate.wait(120)

    plane.submit_put(chunk_name(1), 16, 0, fill_slowly, lambda: None, lambda _: None)
    wait_until(lambda: plane.queued == 0, "the first put to begin")
    pending = [transfers.put_later(chunk_name(2), payload_of(chunk_name(2)), 0, Priority.BEHIND)]
    assert plane.take_behind(LAYOUT.chunk_bytes)
    pending.append(transfers.put_later(chunk_name(3), payload_of(chunk_name(3))))
    assert not plane.take_behind(LAYOUT.chunk_bytes)
    gate.set()
    assert all(put().ok for put in pending)
    assert plane.take_behind(LAYOUT.chunk_bytes)


@pytest.mark.integration
def test_write_behind_does_not_delay_other_operations_on_a_real_link(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls)
    marker = transfers.stored(chunk_name(1))
    gate = threading.Event()
    filling: list[int] = []

    def fill_slowly(*_: object) -> None:
        filling.append(1)
        gate.wait(120)

    results: list[object] = []
    for number in range(2, 6):
        transfers.plane.submit_put(
            chunk_name(number), 16, 0, fill_slowly, lambda: None, results.append, Priority.BEHIND
        )
    wait_until(lambda: bool(filling), "write-behind to begin")
    for _ in range(20):  # one thread is blocked in write-behind; the other serves everything else
        assert transfers.get(chunk_name(1), marker)[0].ok
        assert transfers.put(chunk_name(9)).ok
    assert len(filling) == 1
    gate.set()
    wait_until(lambda: len(results) == 4, "write-behind to end")
    with plain_client(single.data_urls[0]) as client:
        assert client.dbsize() == 6
