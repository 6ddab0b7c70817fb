"""Nodes are drained under load: each stream is whole and right, and nobody sees an error.

Streams of all kinds run on two nodes of each role; every answer must be the undisturbed one. What
drains gets nothing new, is empty in the end, and takes requests again when it is told to. The last
test drains one node after another while clients never cease to ask.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support.clients.http import complete, exchange
from tests.support.clients.streams import ask
from tests.support.faults.cases import PATH, Case, Sizes, make_cases
from tests.support.faults.chaos_run import Clients, known_answers
from tests.support.faults.drains import Load, Retries, empty, node_of, tell
from tests.support.pools.leaks import settle
from tests.support.pools.processes import Cluster

SIZES = Sizes(target=64, others=48, answer=120)
LONG = Sizes(target=64, others=48, answer=500)
PATIENCE_S = 240.0
TRIES = 5
CLIENTS, REQUESTS, SEED = 12, 60, 7
DEADLINES_S = (0.0, 0.1, 0.5, 600.0)  # of nodes that drain in turn
DECODES = ("decode-0", "decode-1")
NODES = ("prefill-0", "prefill-1", *DECODES)


@pytest.fixture(autouse=True)
def whole(pool: Cluster) -> Iterator[None]:
    """After each test nothing drains and nothing is held."""
    pool.witness.forget()
    yield
    for node in pool.pool()["nodes"]:
        if node["state"] == "draining":
            exchange(pool.url, f"/nodes/{node['id']}/resume", b"")
    pool.repair()
    settle(pool)


@contextmanager
def load(pool: Cluster, calm: Cluster, seed: str, sizes: Sizes = SIZES) -> Iterator[Load]:
    """Under way; checked at the end."""
    under = Load(pool, calm, seed, sizes)
    yield under
    under.check()


def decoded_by(pool: Cluster, prompt: list[int]) -> str:
    answer = complete(pool.url, prompt, max_tokens=2, ignore_eos=True)
    placed = answer.headers["x-baton-placement"]
    return placed.split("decode=")[1].split()[0]


def test_before_its_deadline_a_node_finishes_what_it_has_and_gets_nothing_new(
    pool: Cluster, calm: Cluster
) -> None:
    with load(pool, calm, "a") as under:
        told = tell(pool, "decode-0", "drain", deadline_s=600, reason="scale-down")
        assert (told["node"], told["state"]) == ("decode-0", "draining")
        prompts = [[40 + number] * 40 for number in range(6)]
        assert {decoded_by(pool, prompt) for prompt in prompts} == {"decode-1"}
    # A busy machine may lose a link, and move for that.
    assert under.retries.of("drained") == 0
    pool.wait(lambda: empty(pool, "decode-0"), "empty the drained node")
    drained = node_of(pool, "decode-0")
    assert (drained["state"], drained["reason"]) == ("draining", "scale-down")
    tell(pool, "decode-0", "resume")
    tell(pool, "decode-1", "drain")
    assert decoded_by(pool, [90] * 40) == "decode-0"
    assert under.retries.of("drained") == 0


def test_past_its_deadline_what_is_left_moves_and_the_node_is_empty_while_it_goes_on(
    pool: Cluster, calm: Cluster
) -> None:
    with load(pool, calm, "b", LONG) as under:
        tell(pool, "decode-0", "drain", deadline_s=0.1, reason="roll-out")
        pool.wait(lambda: empty(pool, "decode-0"), "empty the drained node")
    ways = [under.on(case) for case in under.moved()]
    assert ["decode-0", "decode-1"] in ways
    assert not any("decode-0" in way[1:] for way in ways)
    assert under.retries.of("drained") > 0

    def saved() -> bool:
        return bool(node_of(pool, "decode-0")["load"]["behind_chunks_total"])

    pool.wait(saved, "store what the streams had")


def test_streams_outlive_the_process_of_their_node(pool: Cluster, calm: Cluster) -> None:
    node = pool.nodes["decode-0"]
    with load(pool, calm, "c", LONG) as under:
        node.end()
        pool.wait(lambda: not node.alive, "end the node")
    assert node.returncode == 0
    assert under.moved()


def test_without_another_decode_node_a_prefill_node_goes_on(pool: Cluster, calm: Cluster) -> None:
    with load(pool, calm, "d", LONG) as under:
        for name in DECODES:
            tell(pool, name, "drain", deadline_s=0.0)
        pool.wait(lambda: all(empty(pool, name) for name in DECODES), "empty the decode nodes")
    last = {pool.witness.where(case.prompt, "decode") for case in under.moved()}
    assert last
    assert last <= {"prefill-0", "prefill-1"}
    assert under.retries.of("drained") > 0


def test_where_nobody_is_left_each_node_keeps_what_it_has_and_new_requests_wait(
    pool: Cluster, calm: Cluster
) -> None:
    with load(pool, calm, "e", LONG) as under, ThreadPoolExecutor(1) as threads:
        for name in NODES:
            tell(pool, name, "drain", deadline_s=600.0)
        for name in NODES:
            tell(pool, name, "drain", deadline_s=0.0)
        waiting = threads.submit(decoded_by, pool, [90] * 40)
        pool.wait(lambda: not under.running, "finish what runs")
        assert not waiting.done()
        tell(pool, "decode-1", "resume")
        assert waiting.result(PATIENCE_S) == "decode-1"
    assert under.retries.of("drained") == 0


def test_prefill_jobs_leave_a_draining_prefill_node(pool: Cluster, calm: Cluster) -> None:
    for turn in range(TRIES):
        sizes = Sizes(target=1500)
        [case] = make_cases(calm.url, "greedy", "job sent", f"f{turn}", sizes, ("greedy",))
        tell(pool, "prefill-1", "drain")
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(ask, pool.url, PATH, case.body)
            wait_placed(pool, case)
            tell(pool, "prefill-1", "resume")
            tell(pool, "prefill-0", "drain", deadline_s=0.0)
            pool.wait(lambda: empty(pool, "prefill-0"), "empty the drained node")
            case.check(answer.result(PATIENCE_S))
        tell(pool, "prefill-0", "resume")
        placed = [each for each in pool.witness.placements(case.prompt) if each.role == "prefill"]
        if len(placed) > 1:  # else the job was done before the drain: once more
            break
    assert [(each.attempt, each.node) for each in placed] == [(1, "prefill-0"), (2, "prefill-1")]


def wait_placed(pool: Cluster, case: Case) -> None:
    pool.wait(lambda: pool.witness.placements(case.prompt), "place the request")


# --- one after another ----------------------------------------------------------------------------


def drain_and_resume(pool: Cluster, name: str, rng: random.Random) -> None:
    """Drain one node, by hand or by SIGTERM; wait until it is empty, and take it back."""
    if rng.random() < 0.25:
        pool.nodes[name].end()
        pool.wait(lambda: not pool.nodes[name].alive, f"end {name}")
        pool.repair()
        return
    tell(pool, name, "drain", deadline_s=rng.choice(DEADLINES_S), reason="its turn")
    pool.wait(lambda: empty(pool, name), f"empty {name}")
    tell(pool, name, "resume")


@pytest.mark.parametrize("turns", [6, pytest.param(150, marks=pytest.mark.long)])
def test_nodes_drain_in_turn_and_no_answer_changes(
    pool: Cluster, calm: Cluster, turns: int
) -> None:
    known, rng = known_answers(calm.url, SEED, REQUESTS), random.Random(SEED)
    retries = Retries(pool)
    with Clients(pool, [known], SEED, CLIENTS) as clients:
        for _ in range(turns):
            drain_and_resume(pool, rng.choice(list(pool.nodes)), rng)
            clients.await_answers(count=CLIENTS)
    # Other causes may be there too: a node that ends within HASTY takes along what was just sent.
    assert retries.of("drained") > 0
