"""A pool rolls out by hand, under load: new nodes join, and old ones drain since they are replaced.

The new kind of nodes says other tokens than the old one, so an answer tells which of them it is
from. Each must be whole and right for one of them; only what outlasts its node's deadline, and has
no other node of its kind, ends with the error that names the revision.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.faults.conftest import HASTY, SLOW_DECODE, SLOW_PREFILL
from tests.support.clients.streams import Told, ask
from tests.support.faults.cases import PATH, Case, Sizes, make_cases
from tests.support.faults.chaos_run import Known, ask_as, known_answers, problem_with
from tests.support.faults.drains import empty, node_of, retries, tell
from tests.support.faults.rows import Kind
from tests.support.pools.leaks import settle
from tests.support.pools.processes import SIM, Cluster

OTHER = "--sim-layers=3"
ROLES = ("prefill", "decode")
CLIENTS, REQUESTS, SEED = 8, 40, 9
STREAMS: tuple[Kind, ...] = ("greedy", "seeded", "two", "logprobs")
LONG = Sizes(target=64, others=48, answer=1000)
BEGUN = 4
PATIENCE_S = 240.0
MESSAGE = (
    "the pool rolled out to revision r1 while this request ran, and no stream crosses over to it;"
    " send the request again"
)
ROLLED_OUT = {"message": MESSAGE, "type": "server_error", "param": None, "code": "rolled_out"}


@pytest.fixture(scope="module")
def other() -> Iterator[Cluster]:
    """What the other kind answers, undisturbed."""
    with Cluster(0, 1, flags=[*SIM, "--kv-blocks=4000", OTHER], store=False) as cluster:
        yield cluster


@pytest.fixture
def rolling() -> Iterator[Cluster]:
    """A node of each role, whose successors are to come."""
    cluster = Cluster(
        *(1, 1),
        prefill_flags=[*SLOW_PREFILL, HASTY],
        decode_flags=[*SLOW_DECODE, HASTY],
        router_flags=["--handoff=always"],
    )
    with cluster:
        yield cluster


def names_of(number: int) -> list[str]:
    return [f"{role}-{number}" for role in ROLES]


def join(pool: Cluster, number: int, *flags: str) -> None:
    """A node of each role starts; they get requests."""
    for role, name in zip(ROLES, names_of(number), strict=True):
        pool.join(name, role, f"--revision=r{number}", *flags)
    pool.await_ready()


@contextmanager
def joined(pool: Cluster, *flags: str) -> Iterator[None]:
    """The same, but what is asked in this block still goes to the old nodes."""
    join(pool, 1, *flags)
    for name in names_of(1):
        tell(pool, name, "drain")
    yield
    for name in names_of(1):
        tell(pool, name, "resume")
    pool.await_ready()


def replaced(pool: Cluster, number: int, deadline_s: float) -> None:
    """The nodes drain since those with the next number are there; they are empty, and end."""
    names = names_of(number)
    for name in names:
        told = {"deadline_s": deadline_s, "reason": "roll-out", "replaced_by": f"r{number + 1}"}
        tell(pool, name, "drain", **told)
    assert node_of(pool, names[0])["replaced_by"] == f"r{number + 1}"
    pool.wait(lambda: all(empty(pool, name) for name in names), "empty the old nodes")
    for name in names:
        pool.leave(name)


class Streams:
    """Long streams that all decode on the old nodes."""

    def __init__(self, pool: Cluster, calm: Cluster, seed: str) -> None:
        self.cases = make_cases(calm.url, "greedy", "mid-stream", seed, LONG, STREAMS)
        self._pool = pool
        self._begun = {case.kind: threading.Event() for case in self.cases}
        self._threads = ThreadPoolExecutor(len(self.cases))
        answers = [self._threads.submit(self._ask, case) for case in self.cases]
        for kind, begun in self._begun.items():
            assert begun.wait(PATIENCE_S), f"the {kind} request does not decode"
        self._answers = dict(zip(STREAMS, answers, strict=True))

    def ends(self) -> list[tuple[Case, Told]]:
        told = [(case, self._answers[case.kind].result(PATIENCE_S)) for case in self.cases]
        self._threads.shutdown()
        return told

    def _ask(self, case: Case) -> Told:
        def heard(told: Told) -> bool:
            seen = told.result.choices.get(0)
            if seen is not None and len(seen.ids) >= BEGUN:
                self._begun[case.kind].set()
            return True

        return ask(self._pool.url, PATH, case.body, heard)


def test_within_a_fingerprint_streams_move_and_are_the_same(
    rolling: Cluster, calm: Cluster
) -> None:
    with joined(rolling):
        streams = Streams(rolling, calm, "same")
    replaced(rolling, 0, 0.1)
    for case, told in streams.ends():
        case.check(told)
        placed = rolling.witness.placements(case.prompt)
        assert placed[-1].node == "decode-1"
    assert retries(rolling)["drained"] >= len(STREAMS)
    settle(rolling)


def test_to_another_fingerprint_what_ends_in_time_is_the_same(
    rolling: Cluster, calm: Cluster
) -> None:
    with joined(rolling, OTHER):
        streams = Streams(rolling, calm, "in time")
    replaced(rolling, 0, 60.0)
    for case, told in streams.ends():
        case.check(told)
        nodes = {each.node for each in rolling.witness.placements(case.prompt)}
        assert nodes == {"prefill-0", "decode-0"}
    assert "drained" not in retries(rolling)
    settle(rolling)


def test_what_outlasts_the_deadline_ends_with_the_error_that_names_the_revision(
    rolling: Cluster, calm: Cluster
) -> None:
    with joined(rolling, OTHER):
        streams = Streams(rolling, calm, "too long")
    replaced(rolling, 0, 0.1)
    for case, told in streams.ends():
        assert told.error == ROLLED_OUT
        assert not told.whole
        for number, choice in told.result.choices.items():
            whole = case.reference.result.choices[number]
            assert choice.ids == whole.ids[: len(choice.ids)]
            assert whole.text.startswith(choice.text)
    settle(rolling)


def test_what_has_no_token_yet_goes_over(rolling: Cluster, other: Cluster) -> None:
    [case] = make_cases(other.url, "seeded", "job sent", "late", Sizes(target=1500), ("seeded",))
    with ThreadPoolExecutor(1) as threads:
        with joined(rolling, OTHER):
            answer = threads.submit(ask, rolling.url, PATH, case.body)
            rolling.wait(lambda: rolling.witness.placements(case.prompt), "place the request")
            rolling.nodes["prefill-0"].freeze_engine()  # else it might be done by the drain
        rolling.nodes["prefill-0"].wake()
        replaced(rolling, 0, 0.0)
        case.check(answer.result(PATIENCE_S))
    placed = rolling.witness.placements(case.prompt)
    assert {(each.attempt, each.node) for each in placed} >= {(1, "prefill-0"), (2, "prefill-1")}
    settle(rolling)


# --- under load -----------------------------------------------------------------------------------


class Asking:
    """Clients that each ask one thing after another until told to stop. `wrong` says what was,
    `by` counts the answers of each kind of nodes."""

    def __init__(self, pool: Cluster, kinds: list[list[Known]]) -> None:
        self._pool = pool
        self._kinds = kinds
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(CLIENTS)
        self.wrong: list[str] = []
        self.by = [0] * len(kinds)
        for number in range(CLIENTS):
            self._threads.submit(self._client, random.Random(f"{SEED}/{number}"))

    def serves(self, kind: int) -> None:
        """Wait until these nodes answer, unless something is wrong."""
        before = self.by[kind]
        self._pool.wait(lambda: self.wrong or self.by[kind] > before, "serve with the new nodes")
        assert self.wrong == []

    def end(self) -> None:
        self._stop.set()
        self._threads.shutdown()

    def _client(self, rng: random.Random) -> None:
        while not self._stop.is_set() and not self.wrong:
            number = rng.randrange(REQUESTS)
            told = ask_as(self._pool.url, self._kinds[0][number].asked)
            problems = [problem_with(told, known[number]) for known in self._kinds]
            if all(problems):
                self.wrong.append("\nor\n".join(problems))
                return
            self.by[problems.index("")] += 1


def run(pool: Cluster, calm: Cluster, other: Cluster, rolls: int) -> None:
    """Roll from one kind to the other and back, so often."""
    kinds = [known_answers(one.url, SEED, REQUESTS) for one in (calm, other)]
    asking = Asking(pool, kinds)
    try:
        for number in range(rolls):
            join(pool, number + 1, *([OTHER] if number % 2 == 0 else []))
            replaced(pool, number, 60.0)
            asking.serves((number + 1) % 2)
    finally:
        asking.end()
    assert asking.wrong == []
    settle(pool)


def test_no_client_sees_a_roll_out_to_another_fingerprint_and_back(
    rolling: Cluster, calm: Cluster, other: Cluster
) -> None:
    run(rolling, calm, other, 2)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_client_sees_many_roll_outs(rolling: Cluster, calm: Cluster, other: Cluster) -> None:
    run(rolling, calm, other, 20)
