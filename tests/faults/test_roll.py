"""A manual roll-out under load: new nodes join, and the old nodes that they replace drain.

The new kind of nodes generates other tokens than the old kind, so an answer shows which kind it is
from. Each answer must be complete and correct for one of the kinds. Only a stream that outlives its
node's deadline, and has no other node of its kind, ends with the error that names the revision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.faults.conftest import SHORT_DRAIN, SLOW_DECODE, SLOW_PREFILL
from tests.support.clients.streams import ask
from tests.support.faults.cases import PATH, Sizes, make_cases
from tests.support.faults.chaos_run import Clients, known_answers
from tests.support.faults.drains import RunningRequests, is_drained, node_entry, post_action
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


class RollingPool:
    """A pool with a node of each role, which are repeatedly replaced by nodes of the same or the
    other kind. `undisturbed_pools` has an undisturbed pool for each of the two kinds."""

    def __init__(self, pool: Cluster, undisturbed_pools: Sequence[Cluster]) -> None:
        self.pool = pool
        self.undisturbed_pools = undisturbed_pools
        self.number = 0  # of the serving nodes
        self.kind = 0  # of the serving nodes

    def nodes(self, later: int = 0) -> dict[str, str]:
        """Return the names of the serving nodes by role; with `later` 1, those of the next ones."""
        return {role: f"{role}-{self.number + later}" for role in ROLES}

    @property
    def undisturbed(self) -> Cluster:
        """The undisturbed pool of the serving nodes' kind."""
        return self.undisturbed_pools[self.kind]

    @property
    def revision(self) -> str:
        """The revision of the next nodes."""
        return f"r{self.number + 1}"

    def join(self, *, other: bool) -> None:
        """Start the next node of each role, which gets requests; of the other kind if `other`."""
        self._next_kind = 1 - self.kind if other else self.kind
        flags = [OTHER] if self._next_kind else []
        for role, name in self.nodes(1).items():
            self.pool.join(name, role, f"--revision={self.revision}", *flags)
        self.pool.await_ready()

    @contextmanager
    def joined(self, *, other: bool) -> Iterator[None]:
        """Start the next nodes as join() does; requests of the block still go to the old nodes."""
        self.join(other=other)
        for name in self.nodes(1).values():
            post_action(self.pool, name, "drain")
        yield
        for name in self.nodes(1).values():
            post_action(self.pool, name, "resume")
        self.pool.await_ready()

    def replace(self, deadline_s: float) -> None:
        """Drain the old nodes as replaced, wait until they have no requests, and end them."""
        names = list(self.nodes().values())
        body = {"deadline_s": deadline_s, "reason": "roll-out", "replaced_by": self.revision}
        for name in names:
            post_action(self.pool, name, "drain", **body)
        assert node_entry(self.pool, names[0])["replaced_by"] == self.revision
        self.pool.wait(
            lambda: all(is_drained(self.pool, name) for name in names), "empty the old nodes"
        )
        for name in names:
            self.pool.leave(name)
        self.number, self.kind = self.number + 1, self._next_kind


@pytest.fixture(scope="module")
def rolling(undisturbed: Cluster) -> Iterator[RollingPool]:
    pool = Cluster(
        *(1, 1),
        prefill_flags=[*SLOW_PREFILL, SHORT_DRAIN],
        decode_flags=[*SLOW_DECODE, SHORT_DRAIN],
        router_flags=["--handoff=always"],
    )
    other = Cluster(0, 1, flags=[*SIM, "--kv-blocks=4000", OTHER], store=False)
    with pool, other:
        yield RollingPool(pool, (undisturbed, other))


def streams(rolling: RollingPool, seed: str, sizes: Sizes = LONG) -> RunningRequests:
    """Start long streams that all decode on the old nodes."""
    return RunningRequests(rolling.pool, rolling.undisturbed, seed, sizes, STREAMS)


def test_a_roll_out_within_a_fingerprint_moves_streams_without_a_difference(
    rolling: RollingPool,
) -> None:
    new = rolling.nodes(1)
    with rolling.joined(other=False):
        requests = streams(rolling, "same")
    rolling.replace(0.1)
    requests.check()
    assert {requests.decode_nodes(case)[-1] for case in requests.cases} == {new["decode"]}
    assert requests.retries.of("drained") >= len(STREAMS)
    settle(rolling.pool)


def test_a_roll_out_to_another_fingerprint_lets_streams_finish_before_the_deadline(
    rolling: RollingPool,
) -> None:
    old = rolling.nodes()
    with rolling.joined(other=True):
        requests = streams(rolling, "in time")
    rolling.replace(NEVER_S)
    requests.check()
    for case in requests.cases:
        nodes = {each.node for each in rolling.pool.witness.placements(case.prompt)}
        assert nodes == set(old.values())
    assert requests.retries.of("drained") == 0
    settle(rolling.pool)


def test_a_stream_that_outlives_the_deadline_ends_with_an_error_that_names_the_revision(
    rolling: RollingPool,
) -> None:
    message = MESSAGE.format(rolling.revision)
    with rolling.joined(other=True):
        requests = streams(rolling, "too long", TOO_LONG)
    rolling.replace(0.1)
    for case, answer in requests.answers():
        assert answer.error == {
            **{"message": message, "type": "server_error", "param": None, "code": "rolled_out"}
        }
        assert not answer.whole
        for number, choice in answer.result.choices.items():
            whole = case.reference.result.choices[number]
            assert choice.ids == whole.ids[: len(choice.ids)]
            assert whole.text.startswith(choice.text)
    settle(rolling.pool)


def test_a_request_without_a_token_moves_to_the_new_fingerprint(rolling: RollingPool) -> None:
    pool, old, new = rolling.pool, rolling.nodes(), rolling.nodes(1)
    undisturbed = rolling.undisturbed_pools[1 - rolling.kind]
    [case] = make_cases(
        undisturbed.url, "seeded", "job sent", "late", Sizes(target=1500), ("seeded",)
    )
    with ThreadPoolExecutor(1) as threads:
        with rolling.joined(other=True):
            answer = threads.submit(ask, pool.url, PATH, case.body)
            pool.wait(lambda: pool.witness.placements(case.prompt), "place the request")
            pool.nodes[old["prefill"]].freeze_engine()  # otherwise it may end before the drain
        pool.nodes[old["prefill"]].wake()
        rolling.replace(0.0)
        case.check(answer.result(PATIENCE_S))
    placed = {(each.attempt, each.node) for each in pool.witness.placements(case.prompt)}
    assert placed >= {(1, old["prefill"]), (2, new["prefill"])}
    settle(pool)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rolls", [2, pytest.param(20, marks=pytest.mark.long)])
def test_clients_do_not_notice_roll_outs_to_another_fingerprint_and_back(
    rolling: RollingPool, rolls: int
) -> None:
    kinds = [known_answers(pool.url, SEED, REQUESTS) for pool in rolling.undisturbed_pools]
    with Clients(rolling.pool, kinds, SEED, CLIENTS) as clients:
        for _ in range(rolls):
            rolling.join(other=True)
            rolling.replace(NEVER_S)
            clients.await_answers(rolling.kind)
    settle(rolling.pool)
