"""One node after another is drained and taken back while clients never cease to ask: by hand with
deadlines of all lengths, and by SIGTERM. Every answer is the undisturbed one at the first try.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.faults.chaos_run import Known, ask_as, known_answers, problem_with
from tests.support.faults.drains import empty, retries, tell
from tests.support.pools.leaks import settle
from tests.support.pools.processes import Cluster

CLIENTS, REQUESTS, SEED = 12, 60, 7
DEADLINES_S = (0.0, 0.1, 0.5, 30.0)


class Asking:
    """Clients that each ask one thing after another until told to stop. `wrong` says what was."""

    def __init__(self, pool: Cluster, known: list[Known]) -> None:
        self._pool = pool
        self._known = known
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(CLIENTS)
        self.wrong: list[str] = []
        self.answered = 0
        for number in range(CLIENTS):
            self._threads.submit(self._client, random.Random(f"{SEED}/{number}"))

    def end(self) -> None:
        self._stop.set()
        self._threads.shutdown()

    def _client(self, rng: random.Random) -> None:
        while not self._stop.is_set() and not self.wrong:
            known = rng.choice(self._known)
            problem = problem_with(ask_as(self._pool.url, known.asked), known)
            self.wrong += [problem] if problem else []
            self.answered += 1


def turn(pool: Cluster, name: str, rng: random.Random) -> None:
    """Drain one node, wait until it is empty, take it back."""
    if rng.random() < 0.25:
        pool.nodes[name].end()
        pool.wait(lambda: not pool.nodes[name].alive, f"end {name}")
        pool.repair()
        return
    tell(pool, name, "drain", deadline_s=rng.choice(DEADLINES_S), reason="its turn")
    pool.wait(lambda: empty(pool, name), f"empty {name}")
    tell(pool, name, "resume")


def run(pool: Cluster, calm: Cluster, turns: int) -> None:
    asking = Asking(pool, known_answers(calm.url, SEED, REQUESTS))
    rng, before = random.Random(SEED), retries(pool)
    try:
        for _ in range(turns):
            if not asking.wrong:
                turn(pool, rng.choice(list(pool.nodes)), rng)
    finally:
        asking.end()
    assert asking.wrong == []
    # Other causes may be there too: a node that ends within HASTY takes along what was just sent.
    assert retries(pool).get("drained", 0) > before.get("drained", 0)
    settle(pool)


def test_nodes_drain_in_turn_and_no_answer_changes(pool: Cluster, calm: Cluster) -> None:
    run(pool, calm, 12)


@pytest.mark.long
def test_nodes_drain_in_turn_many_times_and_no_answer_changes(pool: Cluster, calm: Cluster) -> None:
    run(pool, calm, 150)
