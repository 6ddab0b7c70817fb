"""A pool whose nodes come and go under load, and the promise that no client notices.

In: a cluster, a spec. Out: the pool, running; loads on it whose answers are compared when they end.
The router stays on the first of the cluster's nodes: its end would break connections, by contract.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count

from tests.cluster.load import AsGood, Load, Shape, never
from tests.cluster.machine.client import Kubernetes
from tests.support.clients.http import Json
from tests.support.kubernetes.operator import RESTRICTED, install_operator
from tests.support.kubernetes.pool import ClusterPool
from tests.support.kubernetes.specs import only_on, rather_on, spread

ROLES = ("prefill", "decode")
# A stream of 80 tokens takes 2 s; a prompt of 200 tokens 0.4 s.
DECODE_MS = 25
PREFILL_MS_PER_TOKEN = 2
# Else it has the smallest share of a busy machine, and a router that is late for three probes is no
# way in any more.
ROUTER = {"requests": {"cpu": "500m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
# More requests than any load of one test asks.
APART = 100_000

Report = Callable[[str, object], None]


@contextmanager
def scaled_pool(
    cluster: Kubernetes, name: str, spec: Json, labels: Mapping[str, str] = RESTRICTED
) -> Iterator[ClusterPool]:
    """Ready, in a namespace of its own with these labels. Its nodes are spread; Redis is rather on
    the cluster's last node, so that draining that one takes the store along."""
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
    """Loads on one pool, none of which asks what another has asked. `calm` are the addresses of
    pools whose answers are right, `as_good` may accept others, `report` takes a line for the end of
    the run."""

    def __init__(self, pool: ClusterPool, calm: Sequence[str], as_good: AsGood = never) -> None:
        self._pool = pool
        self._calm = calm
        self._as_good = as_good
        self._numbers = count(APART, APART)

    @contextmanager
    def running(
        self, what: str, report: Report, shape: Shape, stated: Collection[str] = ()
    ) -> Iterator[Load]:
        """From its clients' first tokens on; at the end all that they were told is checked."""
        with Load(self._pool.url, next(self._numbers), shape) as load:
            load.wait_tokens()
            yield load
            load.check_runs()
        try:
            tally = load.check(self._calm, stated, self._as_good)
        except AssertionError as error:
            error.add_note(f"errors that the clients got: {load.errors()}")
            error.add_note(self._pool.describe())
            raise
        moved = self._pool.moved(load.requests())
        report("scaling", f"{what}: {tally}; {moved} placed more than once")


def settle(pool: ClusterPool, prefill: int, decode: int) -> None:
    """Until it has so many nodes behind its router, and the operator is content."""
    pool.wait_ready()
    wanted = {"prefill": prefill, "decode": decode}
    pool.wait(lambda: nodes_of(pool) == wanted, f"have {wanted}")


def nodes_of(pool: ClusterPool) -> dict[str, int]:
    """Ready ones by role, where exactly these have pods."""
    ready = set(pool.ready_nodes())
    pods = {role: {pod.name for pod in pool.pods(role)} for role in ROLES}
    return {role: len(names) if names <= ready else -1 for role, names in pods.items()}
