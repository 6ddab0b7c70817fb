"""A roll-out under load costs clients no token, and only the documented error rolled_out.

Nodes of another dtype have another fingerprint and generate other ids. Each answer must have, from
its first to its last token, the ids of `baton up` with one of both dtypes: no stream crosses
fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Literal

import pytest

from tests.cluster.load import Shape
from tests.cluster.machine.client import Kubernetes
from tests.cluster.scaled_pool import (
    DECODE_MS,
    PREFILL_MS_PER_TOKEN,
    ROLES,
    Loads,
    Report,
    scaled_pool,
    settle,
)
from tests.support.clients.http import Json
from tests.support.kubernetes.pool import ClusterPool
from tests.support.kubernetes.specs import SIM_UP, sim_spec
from tests.support.needs import needs
from tests.support.pools.baton_up import Pool

pytestmark = pytest.mark.timeout(1200)

Target = Literal["same", "other"]
PREFILL, DECODE = 1, 1
# With more decode nodes, a roll-out also has states in which a role has old and new nodes.
MORE_DECODE = 2
TARGETS: tuple[Target, ...] = ("same", "other", "other")
LONG_ROUNDS, LONG_LOADS = 10, 5
SHAPE = Shape(clients=6, tokens=80)
# A stream takes 40 s. No node of another fingerprint may continue it, and it outlasts the drain
# even if a slow machine delays the operator.
LONG_SHAPE = Shape(clients=6, tokens=1600)
MAX_DRAIN_S = 2
LINK_S = 20.0  # for a broken link to return
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def pool(cluster: Kubernetes) -> Iterator[ClusterPool]:
    needs("own_cluster")
    spec = sim_spec(
        prefill=PREFILL,
        decode=DECODE,
        decode_ms=DECODE_MS,
        prefill_ms_per_token=PREFILL_MS_PER_TOKEN,
    )
    spec["engine"]["dtype"] = DTYPES[0]
    with scaled_pool(cluster, "rolls", spec) as running:
        yield running


@pytest.fixture(scope="module")
def loads(pool: ClusterPool, reference_pool: Pool) -> Iterator[Loads]:
    with Pool([*SIM_UP, "--dtype", DTYPES[1]]) as other:
        yield Loads(pool, [reference_pool.url, other.url])


@pytest.fixture
def ready_pool(pool: ClusterPool) -> ClusterPool:
    settle(pool, PREFILL, DECODE)
    return pool


@pytest.fixture(scope="module")
def roller(pool: ClusterPool) -> Roller:
    return Roller(pool)


class Roller:
    """Rolls a pool out, and checks all the time that a pair of nodes can serve."""

    def __init__(self, pool: ClusterPool) -> None:
        self._pool = pool
        self._numbers = count(1)
        self._served: set[str] = set()

    def roll_out(self, target: Target, decode: int = DECODE) -> None:
        old, number = self.revision(), next(self._numbers)
        if target == "same":
            notes = {"metadata": {"annotations": {"example.com/roll": str(number)}}}
            self._pool.patch({role: {"podTemplate": notes} for role in ROLES})
        else:
            now = self._pool.read("bpool", self._pool.name)["spec"]["engine"]["dtype"]
            self._pool.patch({"engine": {"dtype": DTYPES[now == DTYPES[0]]}})
        self._pool.wait(lambda: self._is_rolled_out(old), "have nodes of the new revision alone")
        settle(self._pool, PREFILL, decode)

    def revision(self) -> str:
        """The wanted revision of the pool's nodes."""
        found: str = self._pool.read("bpool", self._pool.name)["status"]["revision"]
        return found

    def _is_rolled_out(self, old: str) -> bool:
        ready, known = self._ready(), set(self._served)
        self._served |= {node["id"] for node in ready}
        if _pair_in(ready):
            return all(node["revision"] != old for node in ready)

        def known_pair_is_back() -> bool:
            return _pair_in([node for node in self._ready() if node["id"] in known])

        # A busy machine can break links for a moment. Nodes that started later do not count.
        self._pool.wait(known_pair_is_back, "have a pair that can serve", LINK_S)
        return False

    def _ready(self) -> list[Json]:
        return [node for node in self._pool.state()["nodes"] if node["state"] == "ready"]


def _pair_in(nodes: list[Json]) -> bool:
    """Whether nodes of both roles share a fingerprint."""
    kinds = {node["fingerprint"] for node in nodes}
    return set(ROLES) in [
        {node["role"] for node in nodes if node["fingerprint"] == kind} for kind in kinds
    ]


def test_a_roll_out_costs_no_token(
    ready_pool: ClusterPool, roller: Roller, loads: Loads, record_property: Report
) -> None:
    what = f"rolled out to {', '.join(TARGETS)} fingerprint"
    with loads.running(what, record_property, SHAPE):
        for to in TARGETS:
            roller.roll_out(to)


def test_streams_that_outlast_a_roll_out_to_another_fingerprint_get_only_the_error_rolled_out(
    ready_pool: ClusterPool, roller: Roller, loads: Loads, record_property: Report
) -> None:
    ready_pool.patch({"rollout": {"maxDrainSeconds": MAX_DRAIN_S}})
    what = f"streams that outlast maxDrainSeconds ({MAX_DRAIN_S})"
    try:
        with loads.running(what, record_property, LONG_SHAPE, {"rolled_out"}) as load:
            roller.roll_out("other")
    finally:
        ready_pool.patch({"rollout": None})
    errors = load.errors()
    assert errors, "no stream outlasted the roll-out"
    assert all(roller.revision() in error["message"] for error in errors), errors
    assert {error["type"] for error in errors} == {"server_error"}


@pytest.mark.long
def test_a_roll_out_whose_nodes_fail_stops_and_reverting_the_spec_ends_it(
    ready_pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    before = uids(ready_pool)
    image = {"name": "node", "image": "local.test/missing:1"}
    with loads.running("a roll-out that fails, and is set back", record_property, SHAPE):
        ready_pool.patch({"decode": {"podTemplate": {"spec": {"containers": [image]}}}})
        ready_pool.wait(
            lambda: blocked(ready_pool)["status"] == "True", "report that the roll-out is blocked"
        )
        assert blocked(ready_pool)["reason"] == "NewNodesFailing"
        assert image["image"] in blocked(ready_pool)["message"]
        assert ready_pool.conditions()["Serving"]["status"] == "True"
        ready_pool.patch({"decode": {"podTemplate": {"spec": {"containers": None}}}})
        settle(ready_pool, PREFILL, DECODE)
    assert uids(ready_pool) == before


def blocked(pool: ClusterPool) -> Json:
    return pool.conditions()["RolloutBlocked"]


def uids(pool: ClusterPool) -> set[str]:
    return {pod.uid for role in ROLES for pod in pool.pods(role)}


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("to", ["same", "other"])
def test_fifty_roll_outs_cost_no_token(
    to: Target, ready_pool: ClusterPool, roller: Roller, loads: Loads, record_property: Report
) -> None:
    ready_pool.patch({"decode": {"replicas": MORE_DECODE}})
    try:
        settle(ready_pool, PREFILL, MORE_DECODE)
        for number in range(LONG_LOADS):
            times = f"{LONG_ROUNDS} times, {number + 1} of {LONG_LOADS}"
            what = f"rolled out to the {to} fingerprint {times}"
            with loads.running(what, record_property, SHAPE):
                for _ in range(LONG_ROUNDS):
                    roller.roll_out(to, MORE_DECODE)
    finally:
        ready_pool.patch({"decode": {"replicas": DECODE}})
