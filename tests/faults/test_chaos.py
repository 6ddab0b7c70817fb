"""Chaos: for one minute (or ten) a fault is injected every few seconds under 32 clients.

Faults kill, freeze or cut off nodes, their links to the router, the index, any of three data
servers, and the links to those. Every answer must be the undisturbed one at the first try. The seed
determines the faults, their times and the requests; BATON_CHAOS_SEED repeats a run as far as the
machine's timing allows. The end of pytest's output summarizes each run. All runs belong to `make
test-long`, because their course depends on the machine's speed. test_fault_table tests each fault
separately.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.support.clients.http import text_of
from tests.support.faults.breaker import Breaker
from tests.support.faults.chaos_plan import ALL_DECODE, NODE_FAULTS, STORE_FAULTS, make_plan
from tests.support.faults.chaos_run import Clients, known_answers
from tests.support.pools.leaks import SPARE, SPARE_WITH_TORCH, Level, Levels, metrics_of, settle
from tests.support.pools.processes import SIM, Cluster
from tests.support.stores.store_faults import FaultyStore

CLIENTS = 32
REQUESTS = 250  # different requests, each of which may be sent many times
TORCH_CLIENTS, TORCH_REQUESTS, TORCH_S = 8, 60, 20.0
RESUMED = "baton_router_resumed_requests_total"
RETRIES = re.compile(r'^baton_router_retries_total\{cause="(\w+)"\} (\S+)$', re.MULTILINE)
LEAST_DECODE_SHARE = 0.1  # low, because a slow machine restarts nodes slowly
SEED_VARIABLE = "BATON_CHAOS_SEED"
# SHORT_SEED: a minute with every kind of store fault on every server. TORCH_SEED: 20 s with a
# decode node's death, a frozen data server, and cut and lossy links. LONG_SEED: ten minutes with
# everything.
SHORT_SEED, TORCH_SEED, LONG_SEED = 66, 60, 1
DATA_SERVERS = 3
ROUTER = ("--handoff-min-tokens=32", "--stall-timeout=4")


def three_servers() -> FaultyStore:
    return FaultyStore(data_servers=DATA_SERVERS, links=True)


def seed_of(default: int) -> int:
    return int(os.environ.get(SEED_VARIABLE, default))


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Cluster]:
    flags = [*SIM, "--sim-eos-every=60", "--kv-blocks=4000"]
    with Cluster(0, 1, flags=flags, store=False) as cluster:
        yield cluster


@pytest.fixture
def pool() -> Iterator[Cluster]:
    cluster = Cluster(
        *(2, 2),
        flags=[*SIM, "--sim-eos-every=60", "--kv-blocks=800", "--sim-decode-ms=20"],
        prefill_flags=["--sim-prefill-ms-per-token=0.2"],
        router_flags=ROUTER,
        store=three_servers(),
        watch_answers=False,
    )
    with cluster:
        yield cluster


@pytest.fixture
def torch_pool(torch_flags: list[str]) -> Iterator[Cluster]:
    cluster = Cluster(
        *(1, 2),
        flags=torch_flags,
        prefill_flags=["--max-batched-tokens=32"],
        decode_flags=["--overlap=on"],
        router_flags=["--handoff=always", "--stall-timeout=4"],
        store=three_servers(),
    )
    with cluster:
        yield cluster


def chaos(
    pool: Cluster, clients: Clients, seed: int, duration_s: float, spare: Level = SPARE
) -> str:
    """Run the faults and the clients, check that no resource is leaked, and return a summary."""
    levels = Levels(spare)
    levels.check(pool)
    assert pool.store is not None
    plan = make_plan(seed, duration_s, list(pool.nodes), pool.store.data)
    try:
        with Breaker(pool, plan) as breaker, clients:
            clients.run_for(duration_s, breaker)
    except AssertionError as error:
        if clients.wrong:
            error.add_note(clients.describe_failure(breaker))
        error.add_note(f"{SEED_VARIABLE}={seed} repeats it\n{pool.logs()}")
        raise
    assert breaker.failure is None, breaker.failure
    resumed = metrics_of(pool.url)[RESUMED]
    lost = RETRIES.findall(text_of(pool.url, "/metrics"))
    mishaps = sum(link.mishaps.total() for link in pool.store.links.values())
    summary = (
        f"seed {seed}, {duration_s:g} s: {clients.tally}; {len(plan)} faults: "
        f"{dict(Counter(fault.how for fault in plan))}; a decode node was up "
        f"{breaker.decode_share:.0%} of the time; {resumed:g} streams resumed; "
        f"attempts lost: {dict(lost)}; {mishaps} mishaps on lossy links"
    )
    print(summary)
    pool.repair()
    settle(pool)
    levels.check(pool)
    assert set(clients.tally.statuses) <= {200, 0}, clients.tally.statuses
    assert resumed > 0
    assert breaker.decode_share > LEAST_DECODE_SHARE
    return summary


def test_the_plan_of_ten_minutes_has_every_kind_of_fault_on_every_part() -> None:
    nodes = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    data = ("data0", "data1", "data2")
    plan = make_plan(LONG_SEED, 600.0, nodes, data)
    hit = {fault.what for fault in plan}
    assert hit == {*nodes, ALL_DECODE, *data, "index", "data", "both"}
    hows = {on_node: set[str]() for on_node in (True, False)}
    for fault in plan:
        hows[fault.what in (*nodes, ALL_DECODE)].add(fault.how)
    assert hows[True] == {how for how, _, _ in NODE_FAULTS}
    assert hows[False] == {how for how, _, _ in STORE_FAULTS}


def run_on_sim(pool: Cluster, undisturbed: Cluster, seed: int, duration_s: float) -> str:
    known = known_answers(undisturbed.url, seed, REQUESTS)
    clients = Clients(pool, [known], seed, CLIENTS)
    summary = chaos(pool, clients, seed, duration_s)
    assert clients.tally.requests > CLIENTS
    return summary


@pytest.mark.long
def test_a_minute_of_chaos_changes_no_answer(
    pool: Cluster, undisturbed: Cluster, record_property: Callable[[str, object], None]
) -> None:
    record_property("chaos", f"sim: {run_on_sim(pool, undisturbed, seed_of(SHORT_SEED), 60.0)}")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_minutes_of_chaos_change_no_answer(
    pool: Cluster, undisturbed: Cluster, record_property: Callable[[str, object], None]
) -> None:
    record_property("chaos", f"sim: {run_on_sim(pool, undisturbed, seed_of(LONG_SEED), 600.0)}")


@pytest.mark.long
def test_twenty_seconds_of_chaos_change_no_bit_of_a_real_models_answers(
    torch_pool: Cluster,
    torch_undisturbed: Cluster,
    record_property: Callable[[str, object], None],
) -> None:
    seed = seed_of(TORCH_SEED)
    known = known_answers(torch_undisturbed.url, seed, TORCH_REQUESTS)
    clients = Clients(torch_pool, [known], seed, TORCH_CLIENTS)
    summary = chaos(torch_pool, clients, seed, TORCH_S, SPARE_WITH_TORCH)
    record_property("chaos", f"torch: {summary}")
