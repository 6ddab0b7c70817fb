"""A pool rolls out by hand, under load: new nodes join, and old ones drain since they are replaced.

The new kind of nodes says other tokens than the old one, so an answer tells which of them it is
from. Each must be whole and right for one of them; only what outlasts its node's deadline, and has
no other node of its kind, ends with the error that names the revision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.faults.conftest import HASTY, SLOW_DECODE, SLOW_PREFILL
from tests.support.clients.streams import ask
from tests.support.faults.cases import PATH, Sizes, make_cases
from tests.support.faults.chaos_run import Clients, known_answers
from tests.support.faults.drains import Load, empty, node_of, tell
from tests.support.faults.rows import Kind
from tests.support.pools.leaks import settle
from tests.support.pools.processes import SIM, Cluster

OTHER = "--sim-layers=3"
ROLES = ("prefill", "decode")
CLIENTS, REQUESTS, SEED = 8, 40, 9
STREAMS: tuple[Kind, ...] = ("greedy", "seeded", "two", "logprobs")
LONG = Sizes(target=64, others=48, answer=600)
TOO_LONG = Sizes(target=64, others=48, answer=1200)
PATIENCE_S = 240.0
NEVER_S = 600.0
MESSAGE = (
    "the pool rolled out to revision {} while this request ran, and a running stream cannot"
    " move to it; send the request again"
)


class Rolling:
    """A pool with a node of each role, which nodes of the same kind or of the other one replace
    again and again. `calms` has an undisturbed pool for each of the two kinds."""

    def __init__(self, pool: Cluster, calms: Sequence[Cluster]) -> None:
        self.pool = pool
        self.calms = calms
        self.number = 0  # of the nodes that serve
        self.kind = 0

    def nodes(self, later: int = 0) -> dict[str, str]:
        """Names by role; `later` 1: of those that come next."""
        return {role: f"{role}-{self.number + later}" for role in ROLES}

    @property
    def calm(self) -> Cluster:
        """Answers as the nodes that serve now."""
        return self.calms[self.kind]

    @property
    def revision(self) -> str:
        """Of the nodes that come next."""
        return f"r{self.number + 1}"

    def join(self, *, other: bool) -> None:
        """The next node of each role starts; they get requests. `other`: of the other kind."""
        self._kind_after = 1 - self.kind if other else self.kind
        flags = [OTHER] if self._kind_after else []
        for role, name in self.nodes(1).items():
            self.pool.join(name, role, f"--revision={self.revision}", *flags)
        self.pool.await_ready()

    @contextmanager
    def joined(self, *, other: bool) -> Iterator[None]:
        """The same, but what is asked in this block still goes to the old nodes."""
        self.join(other=other)
        for name in self.nodes(1).values():
            tell(self.pool, name, "drain")
        yield
        for name in self.nodes(1).values():
            tell(self.pool, name, "resume")
        self.pool.await_ready()

    def replace(self, deadline_s: float) -> None:
        """The old nodes drain since the next ones are there; they are empty, and end."""
        names = list(self.nodes().values())
        words = {"deadline_s": deadline_s, "reason": "roll-out", "replaced_by": self.revision}
        for name in names:
            tell(self.pool, name, "drain", **words)
        assert node_of(self.pool, names[0])["replaced_by"] == self.revision
        self.pool.wait(lambda: all(empty(self.pool, name) for name in names), "empty the old nodes")
        for name in names:
            self.pool.leave(name)
        self.number, self.kind = self.number + 1, self._kind_after


@pytest.fixture(scope="module")
def rolling(calm: Cluster) -> Iterator[Rolling]:
    pool = Cluster(
        *(1, 1),
        prefill_flags=[*SLOW_PREFILL, HASTY],
        decode_flags=[*SLOW_DECODE, HASTY],
        router_flags=["--handoff=always"],
    )
    other = Cluster(0, 1, flags=[*SIM, "--kv-blocks=4000", OTHER], store=False)
    with pool, other:
        yield Rolling(pool, (calm, other))


def streams(rolling: Rolling, seed: str, sizes: Sizes = LONG) -> Load:
    """Long streams that all decode on the old nodes."""
    return Load(rolling.pool, rolling.calm, seed, sizes, STREAMS)


def test_within_a_fingerprint_streams_move_and_are_the_same(rolling: Rolling) -> None:
    new = rolling.nodes(1)
    with rolling.joined(other=False):
        under = streams(rolling, "same")
    rolling.replace(0.1)
    under.check()
    assert {under.on(case)[-1] for case in under.cases} == {new["decode"]}
    assert under.retries.of("drained") >= len(STREAMS)
    settle(rolling.pool)


def test_to_another_fingerprint_what_ends_in_time_is_the_same(rolling: Rolling) -> None:
    old = rolling.nodes()
    with rolling.joined(other=True):
        under = streams(rolling, "in time")
    rolling.replace(NEVER_S)
    under.check()
    for case in under.cases:
        nodes = {each.node for each in rolling.pool.witness.placements(case.prompt)}
        assert nodes == set(old.values())
    assert under.retries.of("drained") == 0
    settle(rolling.pool)


def test_what_outlasts_the_deadline_ends_with_the_error_that_names_the_revision(
    rolling: Rolling,
) -> None:
    message = MESSAGE.format(rolling.revision)
    with rolling.joined(other=True):
        under = streams(rolling, "too long", TOO_LONG)
    rolling.replace(0.1)
    for case, told in under.ends():
        assert told.error == {
            **{"message": message, "type": "server_error", "param": None, "code": "rolled_out"}
        }
        assert not told.whole
        for number, choice in told.result.choices.items():
            whole = case.reference.result.choices[number]
            assert choice.ids == whole.ids[: len(choice.ids)]
            assert whole.text.startswith(choice.text)
    settle(rolling.pool)


def test_what_has_no_token_yet_goes_over(rolling: Rolling) -> None:
    pool, old, new = rolling.pool, rolling.nodes(), rolling.nodes(1)
    calm = rolling.calms[1 - rolling.kind]
    [case] = make_cases(calm.url, "seeded", "job sent", "late", Sizes(target=1500), ("seeded",))
    with ThreadPoolExecutor(1) as threads:
        with rolling.joined(other=True):
            answer = threads.submit(ask, pool.url, PATH, case.body)
            pool.wait(lambda: pool.witness.placements(case.prompt), "place the request")
            pool.nodes[old["prefill"]].freeze_engine()  # else it might be done by the drain
        pool.nodes[old["prefill"]].wake()
        rolling.replace(0.0)
        case.check(answer.result(PATIENCE_S))
    placed = {(each.attempt, each.node) for each in pool.witness.placements(case.prompt)}
    assert placed >= {(1, old["prefill"]), (2, new["prefill"])}
    settle(pool)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rolls", [2, pytest.param(20, marks=pytest.mark.long)])
def test_no_client_sees_a_roll_out_to_another_fingerprint_and_back(
    rolling: Rolling, rolls: int
) -> None:
    kinds = [known_answers(one.url, SEED, REQUESTS) for one in rolling.calms]
    with Clients(rolling.pool, kinds, SEED, CLIENTS) as clients:
        for _ in range(rolls):
            rolling.join(other=True)
            rolling.replace(NEVER_S)
            clients.await_answers(rolling.kind)
    settle(rolling.pool)
