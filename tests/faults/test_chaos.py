"""Chaos: for a minute (or ten) something is killed, frozen or cut every few seconds; 32 clients.

What is hit: nodes, their links to the router, the index, any of three data servers, and the links
to those. Every answer must be the undisturbed one at the first try. The seed says what goes wrong
and when, and what is asked; BATON_CHAOS_SEED repeats a run, as far as machines repeat themselves.
What each run did stands at the end of pytest's output. All runs are for `make test-long`: what one
meets depends on how fast the machine is. test_fault_table has each fault by itself.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients.http import text_of
from tests.support.clients.mix import ClientCall
from tests.support.clients.streams import StreamedAnswer
from tests.support.engines.exactness import rounding_explains
from tests.support.faults.breaker import Breaker
from tests.support.faults.chaos_plan import ALL_DECODE, NODE_FAULTS, STORE_FAULTS, make_plan
from tests.support.faults.chaos_run import Clients, Known, known_answers
from tests.support.pools.leaks import SPARE, SPARE_WITH_TORCH, Level, Levels, metrics_of, settle
from tests.support.pools.processes import SIM, Cluster
from tests.support.stores.store_faults import FaultyStore

CLIENTS = 32
REQUESTS = 250  # different ones, drawn again and again
TORCH_CLIENTS, TORCH_REQUESTS, TORCH_S = 8, 60, 20.0
RESUMED = "baton_router_resumed_requests_total"
RETRIES = re.compile(r'^baton_router_retries_total\{cause="(\w+)"\} (\S+)$', re.MULTILINE)
LEAST_DECODE_SHARE = 0.1  # a slow machine is slow to start nodes again
SEED_VARIABLE = "BATON_CHAOS_SEED"
# A minute with each way to hit the store and each part of it hit; 20 s with a decode node's death,
# a data server frozen and links cut and lossy; and ten minutes, that hold everything anyway.
SHORT_SEED, TORCH_SEED, LONG_SEED = 66, 60, 1
DATA_SERVERS = 3
ROUTER = ("--handoff-min-tokens=32", "--stall-timeout=4")


def three_servers() -> FaultyStore:
    return FaultyStore(data_servers=DATA_SERVERS, links=True)


def seed_of(default: int) -> int:
    return int(os.environ.get(SEED_VARIABLE, default))


@pytest.fixture(scope="module")
def calm() -> Iterator[Cluster]:
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
    """Run it and check that nothing is left; return what it was."""
    levels = Levels(spare)
    levels.check(pool)
    assert pool.store is not None
    plan = make_plan(seed, duration_s, list(pool.nodes), pool.store.data)
    try:
        with Breaker(pool, plan) as breaker, clients:
            clients.go_on(duration_s, breaker)
    except AssertionError as error:
        if clients.wrong:
            error.add_note(clients.story(breaker))
        error.add_note(f"{SEED_VARIABLE}={seed} repeats it\n{pool.logs()}")
        raise
    assert breaker.failure is None, breaker.failure
    resumed = metrics_of(pool.url)[RESUMED]
    lost = RETRIES.findall(text_of(pool.url, "/metrics"))
    mishaps = sum(link.mishaps.total() for link in pool.store.links.values())
    told = (
        f"seed {seed}, {duration_s:g} s: {clients.tally}; {len(plan)} faults: "
        f"{dict(Counter(fault.how for fault in plan))}; a decode node was up "
        f"{breaker.decode_share:.0%} of the time; {resumed:g} streams resumed; "
        f"attempts lost: {dict(lost)}; {mishaps} mishaps on lossy links"
    )
    print(told)
    pool.repair()
    settle(pool)
    levels.check(pool)
    assert set(clients.tally.statuses) <= {200, 0}, clients.tally.statuses
    assert resumed > 0
    assert breaker.decode_share > LEAST_DECODE_SHARE
    return told


def test_ten_minutes_hit_everything_in_every_way() -> None:
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


def run_on_sim(pool: Cluster, calm: Cluster, seed: int, duration_s: float) -> str:
    known = known_answers(calm.url, seed, REQUESTS)
    clients = Clients(pool, [known], seed, CLIENTS)
    told = chaos(pool, clients, seed, duration_s)
    assert clients.tally.requests > CLIENTS
    return told


@pytest.mark.long
def test_a_minute_of_chaos_changes_no_answer(
    pool: Cluster, calm: Cluster, record_property: Callable[[str, object], None]
) -> None:
    record_property("chaos", f"sim: {run_on_sim(pool, calm, seed_of(SHORT_SEED), 60.0)}")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_minutes_of_chaos_change_no_answer(
    pool: Cluster, calm: Cluster, record_property: Callable[[str, object], None]
) -> None:
    record_property("chaos", f"sim: {run_on_sim(pool, calm, seed_of(LONG_SEED), 600.0)}")


@pytest.mark.long
def test_a_short_chaos_changes_no_answer_of_a_real_model(
    torch_pool: Cluster,
    torch_calm: Cluster,
    torch_folder: Path,
    record_property: Callable[[str, object], None],
) -> None:
    seed = seed_of(TORCH_SEED)

    def wanted(asked: ClientCall) -> bool:
        return not asked.body.get("logprobs")

    def as_good(told: StreamedAnswer, known: Known) -> bool:
        return as_likely(told, known, torch_folder)

    known = known_answers(torch_calm.url, seed, TORCH_REQUESTS, wanted)
    clients = Clients(torch_pool, [known], seed, TORCH_CLIENTS, as_good)
    told = chaos(torch_pool, clients, seed, TORCH_S, SPARE_WITH_TORCH)
    record_property("chaos", f"torch: {told}")


def as_likely(told: StreamedAnswer, known: Known, folder: Path) -> bool:
    """Whether rounding explains the first other id of each greedy choice."""
    body = known.asked.body
    if body["temperature"] != 0 or not isinstance(body["prompt"], list) or told.error is not None:
        return False
    pairs = [(one.ids, told.result.choices[i].ids) for i, one in known.answer.choices.items()]
    others = [(wanted, got) for wanted, got in pairs if wanted != got]
    return bool(others) and all(
        rounding_explains(folder, body["prompt"], wanted, got) for wanted, got in others
    )
