"""A roll-out under load costs clients neither a token nor an error, but for the one that is stated.

Nodes of another dtype have another fingerprint, and give other ids: each answer must have those of
`baton up` with the one or with the other, from its first to its last, so that no stream crosses.
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

To = Literal["same", "other"]
PREFILL, DECODE = 1, 1
# Where there are more the roles also meet halfway.
MORE_DECODE = 2
SHORT: tuple[To, ...] = ("same", "other", "other")
LONG_ROUNDS, LONG_LOADS = 10, 5
SHAPE = Shape(clients=6, tokens=80)
# A stream takes 40 s: no node of another fingerprint may go on with it, and however late a slow
# machine's operator comes, nobody waits so long.
LONG_SHAPE = Shape(clients=6, tokens=1600)
MAX_DRAIN_S = 2
LINK_S = 20.0  # in which a link is there again
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
def roll(pool: ClusterPool) -> Roll:
    return Roll(pool)


class Roll:
    """Rolls a pool out, and looks meanwhile: there is always a pair that can serve."""

    def __init__(self, pool: ClusterPool) -> None:
        self._pool = pool
        self._numbers = count(1)
        self._served: set[str] = set()

    def out(self, to: To, decode: int = DECODE) -> None:
        old, number = self.revision(), next(self._numbers)
        if to == "same":
            notes = {"metadata": {"annotations": {"example.com/roll": str(number)}}}
            self._pool.patch({role: {"podTemplate": notes} for role in ROLES})
        else:
            now = self._pool.read("bpool", self._pool.name)["spec"]["engine"]["dtype"]
            self._pool.patch({"engine": {"dtype": DTYPES[now == DTYPES[0]]}})
        self._pool.wait(lambda: self._looked(old), "have nodes of the new revision alone")
        settle(self._pool, PREFILL, decode)

    def revision(self) -> str:
        """What its nodes are to be."""
        found: str = self._pool.read("bpool", self._pool.name)["status"]["revision"]
        return found

    def _looked(self, old: str) -> bool:
        ready, known = self._ready(), set(self._served)
        self._served |= {node["id"] for node in ready}
        if _pair_in(ready):
            return all(node["revision"] != old for node in ready)

        def again() -> bool:
            return _pair_in([node for node in self._ready() if node["id"] in known])

        # A busy machine breaks links for a moment; nodes that come later are none of them.
        self._pool.wait(again, "have a pair that can serve", LINK_S)
        return False

    def _ready(self) -> list[Json]:
        return [node for node in self._pool.state()["nodes"] if node["state"] == "ready"]


def _pair_in(nodes: list[Json]) -> bool:
    """Whether nodes of both roles have one fingerprint."""
    kinds = {node["fingerprint"] for node in nodes}
    return set(ROLES) in [
        {node["role"] for node in nodes if node["fingerprint"] == one} for one in kinds
    ]


def test_a_roll_out_costs_no_token(
    ready_pool: ClusterPool, roll: Roll, loads: Loads, record_property: Report
) -> None:
    what = f"rolled out to {', '.join(SHORT)} fingerprint"
    with loads.running(what, record_property, SHAPE):
        for to in SHORT:
            roll.out(to)


def test_streams_that_outlast_a_roll_to_another_fingerprint_get_the_stated_error_and_no_other(
    ready_pool: ClusterPool, roll: Roll, loads: Loads, record_property: Report
) -> None:
    ready_pool.patch({"rollout": {"maxDrainSeconds": MAX_DRAIN_S}})
    what = f"streams that outlast maxDrainSeconds ({MAX_DRAIN_S})"
    try:
        with loads.running(what, record_property, LONG_SHAPE, {"rolled_out"}) as load:
            roll.out("other")
    finally:
        ready_pool.patch({"rollout": None})
    errors = load.errors()
    assert errors, "no stream was there for so long"
    assert all(roll.revision() in error["message"] for error in errors), errors
    assert {error["type"] for error in errors} == {"server_error"}


@pytest.mark.long
def test_a_roll_out_that_gets_no_node_ready_stops_and_setting_the_spec_back_ends_it(
    ready_pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    before = uids(ready_pool)
    image = {"name": "node", "image": "local.test/missing:1"}
    with loads.running("a roll-out that fails, and is set back", record_property, SHAPE):
        ready_pool.patch({"decode": {"podTemplate": {"spec": {"containers": [image]}}}})
        ready_pool.wait(
            lambda: blocked(ready_pool)["status"] == "True", "say that the roll-out is blocked"
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
    to: To, ready_pool: ClusterPool, roll: Roll, loads: Loads, record_property: Report
) -> None:
    ready_pool.patch({"decode": {"replicas": MORE_DECODE}})
    try:
        settle(ready_pool, PREFILL, MORE_DECODE)
        for number in range(LONG_LOADS):
            times = f"{LONG_ROUNDS} times, {number + 1} of {LONG_LOADS}"
            what = f"rolled out to the {to} fingerprint {times}"
            with loads.running(what, record_property, SHAPE):
                for _ in range(LONG_ROUNDS):
                    roll.out(to, MORE_DECODE)
    finally:
        ready_pool.patch({"decode": {"replicas": DECODE}})
