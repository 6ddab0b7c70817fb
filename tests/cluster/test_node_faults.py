"""Faults under a pool on a cluster delay its streams, but cost no token.

While streams run, a test kills something. Each stream must end with the ids of an undisturbed
`baton up`. The router is not killed, because its death may break connections.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from tests.cluster.machine.client import Kubernetes
from tests.support.kubernetes.operator import RESTRICTED, install_operator, kill_operator
from tests.support.kubernetes.pool import ClusterPool, Pod
from tests.support.kubernetes.specs import only_on, rather_on, sim_spec, spread
from tests.support.kubernetes.streams import (
    Question,
    Streams,
    answers_of,
    ask_by_openai,
    long_streams,
)
from tests.support.needs import needs
from tests.support.pools.baton_up import Pool

STREAMS, TOKENS = 6, 480
MIN_TOKENS = 20  # of each stream before a kill
DECODE_MS = 25  # a stream takes 12 s, since on a busy machine the last starts 5 s after the first
PREFILL_MS_PER_TOKEN = 10  # three prompts on one node take 6 s
NODES = ("prefill", "decode")
STORE = ("kv-index", "kv-data")
# The time until a silent node is noticed, its pods are given up 30 s later, and others start.
NODE_LOST_S = 400.0
ROUNDS = 12  # of the test marked long
TRIES = 5
# Kills all processes of a container except the first, which cannot be killed from inside.
KILL = "import os; os.kill(-1, 9)"

NewQuestions = Callable[[], list[Question]]


@pytest.fixture(scope="module")
def questions() -> NewQuestions:
    """Makes streams with prompts that no test has used before."""
    numbers = count(start=1000, step=STREAMS)
    return lambda: long_streams(STREAMS, TOKENS, next(numbers))


@pytest.fixture(scope="module")
def pool(cluster: Kubernetes) -> Iterator[ClusterPool]:
    """Two nodes of each role, spread over the cluster. The router is on the cluster's first node,
    which no test disturbs, and Redis on the last one."""
    needs("own_cluster")
    install_operator(cluster)
    spec = sim_spec(
        prefill=2, decode=2, decode_ms=DECODE_MS, prefill_ms_per_token=PREFILL_MS_PER_TOKEN
    )
    for role in NODES:
        spec[role]["podTemplate"] = spread(role)
    spec["router"]["podTemplate"] = only_on(cluster.nodes[0])
    spec["kvStore"]["managed"]["podTemplate"] = rather_on(cluster.nodes[-1])
    namespace = cluster.new_namespace(**RESTRICTED)
    try:
        with ClusterPool(cluster, namespace, "chaos") as running:
            running.apply(spec)
            running.wait_ready()
            yield running
    finally:
        cluster.delete_namespace(namespace)


@pytest.fixture
def ready_pool(pool: ClusterPool) -> ClusterPool:
    """The pool, once all its nodes are ready again after the test before."""
    pool.wait_ready()
    pool.wait(lambda: len(pool.ready_nodes()) == 4, "have four nodes behind its router")
    return pool


def _pods(pool: ClusterPool, *components: str) -> list[Pod]:
    return [pod for component in components for pod in pool.pods(component)]


def _delete(pool: ClusterPool, *pods: Pod) -> None:
    names = [pod.name for pod in pods]
    pool.kubectl("delete", "pods", *names, "--grace-period=0", "--force", "--wait=false")


def _stream_through(
    pool: ClusterPool, reference_pool: Pool, questions: NewQuestions, kill: Callable[[Streams], Pod]
) -> Pod:
    """Run streams, call `kill` while they run, and check all answers; return the killed pod. Repeat
    if no stream had to move, because on a slow machine the kill may come too late."""
    for _ in range(TRIES):
        batch = questions()
        with Streams(pool.url, batch) as streams:
            victim = kill(streams)
        assert streams.answers() == answers_of(reference_pool.url, batch)
        pool.wait_ready()
        if pool.moved(streams.requests()) > 0:
            return victim
    raise AssertionError(f"no stream had to move, {TRIES} times")


def test_a_deleted_decode_pod_costs_its_streams_no_token(
    ready_pool: ClusterPool, reference_pool: Pool, questions: NewQuestions
) -> None:
    def delete(streams: Streams) -> Pod:
        streams.wait_tokens(MIN_TOKENS)
        victim = ready_pool.busiest("decode")
        _delete(ready_pool, victim)
        return victim

    victim = _stream_through(ready_pool, reference_pool, questions, delete)
    assert victim.name not in [pod.name for pod in ready_pool.pods("decode")]


def test_a_killed_prefill_pod_costs_no_token(
    ready_pool: ClusterPool, reference_pool: Pool, questions: NewQuestions
) -> None:
    def kill(streams: Streams) -> Pod:
        victim = ready_pool.busiest("prefill")
        args = ("exec", victim.name, "--container=node", "--", "python3", "-c", KILL)
        ready_pool.kubectl(*args)
        return victim

    victim = _stream_through(ready_pool, reference_pool, questions, kill)
    [container] = ready_pool.read("pod", victim.name)["status"]["containerStatuses"]
    assert container["restartCount"] > 0


def test_deleted_redis_pods_cost_no_token_and_hand_off_resumes(
    ready_pool: ClusterPool, reference_pool: Pool, questions: NewQuestions
) -> None:
    servers = _pods(ready_pool, *STORE)
    assert len(servers) == 2
    running, later = questions(), questions()
    with Streams(ready_pool.url, running) as streams:
        streams.wait_tokens(MIN_TOKENS)
        _delete(ready_pool, *servers)
        # These streams run while there may be no store.
        with Streams(ready_pool.url, later) as streams_without_store:
            pass
    assert streams.answers() == answers_of(reference_pool.url, running)
    assert streams_without_store.answers() == answers_of(reference_pool.url, later)
    ready_pool.wait_ready()
    ready_pool.wait(lambda: _hands_off(ready_pool, questions()[0]), "hand prompts over again")


def _hands_off(pool: ClusterPool, question: Question) -> bool:
    short = {**question.body, "max_tokens": 1, "stream": False}
    return "prefill-" in ask_by_openai(pool.url, Question(question.path, short)).placement


def test_a_restarted_kubelet_costs_no_token_and_replaces_no_pod(
    cluster: Kubernetes, ready_pool: ClusterPool, reference_pool: Pool, questions: NewQuestions
) -> None:
    before, batch = _pods(ready_pool, *NODES), questions()
    with Streams(ready_pool.url, batch) as streams:
        streams.wait_tokens(1)
        cluster.restart_kubelet(cluster.nodes[-1])
    assert streams.answers() == answers_of(reference_pool.url, batch)
    ready_pool.wait_ready()
    ready_pool.wait(lambda: _pods(ready_pool, *NODES) == before, "have the same pods as before")


def test_an_api_server_outage_costs_no_token_and_replaces_no_pod(
    cluster: Kubernetes, ready_pool: ClusterPool, reference_pool: Pool, questions: NewQuestions
) -> None:
    running, later = questions(), questions()[: len(NODES)]
    before = _pods(ready_pool, *NODES, *STORE, "router")
    with Streams(ready_pool.url, running) as streams:
        streams.wait_tokens(1)
        with _outage(cluster):
            with Streams(ready_pool.url, later) as meanwhile:
                pass
            answers = streams.answers()
    assert answers == answers_of(reference_pool.url, running)
    assert meanwhile.answers() == answers_of(reference_pool.url, later)
    ready_pool.wait_ready()
    pods = (*NODES, *STORE, "router")
    ready_pool.wait(lambda: _pods(ready_pool, *pods) == before, "have the same pods as before")


@contextmanager
def _outage(cluster: Kubernetes) -> Iterator[None]:
    cluster.stop_apiserver()
    try:
        yield
    finally:
        cluster.start_apiserver()


def test_a_killed_operator_costs_no_token_and_its_successor_applies_edits(
    cluster: Kubernetes, ready_pool: ClusterPool, reference_pool: Pool, questions: NewQuestions
) -> None:
    batch = questions()
    with Streams(ready_pool.url, batch) as streams:
        streams.wait_tokens(1)
        kill_operator(cluster)
        ready_pool.patch({"decode": {"replicas": 3}})
    assert streams.answers() == answers_of(reference_pool.url, batch)
    ready_pool.wait(lambda: ready_pool.row().decode == "3/3", "have the third decode node")
    ready_pool.patch({"decode": {"replicas": 2}})
    ready_pool.wait(lambda: ready_pool.row().decode == "2/2", "have two decode nodes again")
    ready_pool.wait(
        lambda: ready_pool.conditions()["Scaled"]["status"] == "True", "remove the third node"
    )


def test_a_killed_cluster_node_costs_no_token_and_its_pods_move_to_another(
    cluster: Kubernetes, ready_pool: ClusterPool, reference_pool: Pool, questions: NewQuestions
) -> None:
    safe, doomed = cluster.nodes
    replaced, batch = (*NODES, *STORE), questions()
    lost = {pod.name for pod in _pods(ready_pool, *replaced) if pod.host == doomed}
    assert len(lost) >= 2, "the node holds too few of the pool's pods"
    with Streams(ready_pool.url, batch) as streams:
        streams.wait_tokens(MIN_TOKENS)
        cluster.kill_node(doomed)
    try:
        assert streams.answers() == answers_of(reference_pool.url, batch)
        assert ready_pool.moved(streams.requests()) > 0

        def all_safe() -> bool:
            pods = _pods(ready_pool, *replaced)
            return len(pods) == 6 and all(pod.ready and pod.host == safe for pod in pods)

        ready_pool.wait(all_safe, "have its pods on the other node", NODE_LOST_S)
        ready_pool.wait(lambda: ready_pool.row().nodes == ("2/2", "2/2"), "report them as ready")
        assert ready_pool.conditions()["Serving"]["status"] == "True"
    finally:
        cluster.start_node(doomed)
    ready_pool.wait_ready()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_random_pod_deletions_cost_no_token(
    ready_pool: ClusterPool, reference_pool: Pool, questions: NewQuestions
) -> None:
    draw = random.Random(5)
    for _ in range(ROUNDS):
        batch = questions()
        with Streams(ready_pool.url, batch) as streams:
            for component in draw.sample([*NODES, *STORE], 2):
                time.sleep(draw.uniform(0, 2))
                _delete(ready_pool, draw.choice(ready_pool.pods(component)))
        assert streams.answers() == answers_of(reference_pool.url, batch)
        ready_pool.wait_ready()
