"""A pool whose nodes come and go under load, and checks that no client notices.

In: a cluster, a spec. Out: the running pool, and loads on it whose answers are checked at the end.
The router stays on the first of the cluster's nodes, because its end may break connections.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count

from tests.cluster.load import Load, Shape
from tests.cluster.machine.client import Kubernetes
from tests.support.clients.http import Json
from tests.support.kubernetes.operator import RESTRICTED, install_operator
from tests.support.kubernetes.pool import ClusterPool
from tests.support.kubernetes.specs import only_on, rather_on, spread

ROLES = ("prefill", "decode")
# A stream of 80 tokens takes 2 s; a prompt of 200 tokens 0.4 s.
DECODE_MS = 25
PREFILL_MS_PER_TOKEN = 2
# Without a request for CPU the router gets the smallest share of a busy machine. It is taken out of
# its Service when it misses three probes.
ROUTER = {"requests": {"cpu": "500m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
# More requests than any load of one test sends, so that loads share no prompts.
NUMBERS_PER_LOAD = 100_000

Report = Callable[[str, object], None]


@contextmanager
def scaled_pool(
    cluster: Kubernetes, name: str, spec: Json, labels: Mapping[str, str] = RESTRICTED
) -> Iterator[ClusterPool]:
    """A ready pool in a namespace of its own with these labels. Its nodes are spread; Redis prefers
    the cluster's last node, so a drain of that node evicts the store too."""
    install_operator(cluster)
    for role in ROLES:
        spec[role].setdefault("podTemplate", spread(role))
    spec["router"] = {"resources": ROUTER, "podTemplate": only_on(cluster.nodes[0])}
    spec["kvStore"]["managed"]["podTemplate"] = rather_on(cluster.nodes[-1])
    namespace = cluster.new_namespace(**labels)
    try:
        with ClusterPool(cluster, namespace, name) as pool:
            pool.apply(spec)
            pool.wait_ready()
            yield pool
    finally:
        cluster.delete_namespace(namespace)


class Loads:
    """Loads on one pool that share no prompts. `references` are the addresses of pools that give
    the right answers."""

    def __init__(self, pool: ClusterPool, references: Sequence[str]) -> None:
        self._pool = pool
        self._references = references
        self._numbers = count(NUMBERS_PER_LOAD, NUMBERS_PER_LOAD)

    @contextmanager
    def running(
        self, what: str, report: Report, shape: Shape, expected_errors: Collection[str] = ()
    ) -> Iterator[Load]:
        """Run a load; enter once each client has tokens, and check all answers at the end. `report`
        gets a line for the test report."""
        with Load(self._pool.url, next(self._numbers), shape) as load:
            load.wait_tokens()
            yield load
            load.check_running()
        try:
            tally = load.check(self._references, expected_errors)
        except AssertionError as error:
            error.add_note(f"errors that the clients got: {load.errors()}")
            error.add_note(self._pool.describe())
            raise
        moved = self._pool.moved(load.requests())
        report("scaling", f"{what}: {tally}; {moved} placed more than once")


def settle(pool: ClusterPool, prefill: int, decode: int) -> None:
    """Wait until the pool is ready with exactly these numbers of nodes behind its router."""
    pool.wait_ready()
    wanted = {"prefill": prefill, "decode": decode}
    pool.wait(lambda: nodes_of(pool) == wanted, f"have {wanted}")


def nodes_of(pool: ClusterPool) -> dict[str, int]:
    """The number of nodes by role; -1 for a role with a pod whose node the router does not use."""
    ready = set(pool.ready_nodes())
    pods = {role: {pod.name for pod in pool.pods(role)} for role in ROLES}
    return {role: len(names) if names <= ready else -1 for role, names in pods.items()}
