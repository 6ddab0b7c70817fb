"""After an operator is killed at any step, its successor finishes the work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from baton_operator.builders import credentials_of
from baton_operator.names import CREDENTIALS_ANNOTATION
from tests.cluster.fault_proxy import ANSWERED_RESET, RESET, FaultProxy
from tests.cluster.machine.client import Kubernetes
from tests.cluster.operators import SIM, Operator, Pool, until

CHILDREN = 17
# The writes of an operator that creates a whole pool: the children, the status, an event.
WRITES = CHILDREN + 2
FEW = (1, CHILDREN // 2, WRITES - 1, WRITES)


@pytest.mark.parametrize(
    "writes", [FEW, pytest.param(range(1, WRITES + 1), marks=pytest.mark.long)], ids=["few", "each"]
)
@pytest.mark.timeout(900)  # it starts up to 20 operators
def test_after_kills_at_any_write_the_last_operator_finishes(
    plane: Kubernetes, pool: Pool, tmp_path: Path, writes: Iterable[int]
) -> None:
    with (
        FaultProxy(plane.kubeconfig, tmp_path) as proxy,
        Operator(proxy.kubeconfig, tmp_path) as operator,
    ):
        operator.kill()
        pool.apply(SIM)
        for number in writes:
            # The status, write 18, must not be stored, else the successor would post no event.
            fault = ANSWERED_RESET if number % 2 else RESET
            operator.kill_at(proxy, fault, operator.start, number=number)
        operator.start()
        until(lambda: pool.condition("Applied").get("status") == "True", "condition Applied")
        until(lambda: len(pool.children()) == CHILDREN, "the children")
        credentials = credentials_of(pool.child("Secret", "auth"), os.urandom)
        assert credentials is not None
        deployments = [child for child in pool.children().values() if child["kind"] == "Deployment"]
        # One revision, created with the stored credentials.
        assert len(deployments) == 5
        templates = [deployment["spec"]["template"]["metadata"] for deployment in deployments]
        used = {template["annotations"][CREDENTIALS_ANNOTATION] for template in templates}
        assert used == {credentials.digest()}
        assert (
            pool.child("Deployment", "prefill")["metadata"]["labels"]["baton.dev/revision"]
            == (pool.body()["status"]["revision"])
        )


def test_an_edit_is_finished_after_a_kill_in_its_middle(
    plane: Kubernetes, pool: Pool, tmp_path: Path
) -> None:
    pool.apply(SIM)
    with (
        FaultProxy(plane.kubeconfig, tmp_path) as proxy,
        Operator(proxy.kubeconfig, tmp_path) as operator,
    ):
        until(lambda: len(pool.children()) == CHILDREN, "the children")
        edited = {**SIM, "engine": {"kind": "sim", "blockSize": 32}, "handoff": "never"}
        operator.kill_at(proxy, ANSWERED_RESET, lambda: pool.apply(edited), number=2)
        operator.start()
        until(lambda: "--handoff=never" in json.dumps(pool.child("Deployment", "router")), "router")
        until(lambda: "size=32" in json.dumps(pool.child("Deployment", "decode")), "nodes")
        until(lambda: len(pool.children()) == CHILDREN, "the old nodes' end")


def test_sigterm_ends_the_operator(plane: Kubernetes, pool: Pool, tmp_path: Path) -> None:
    pool.apply(SIM)
    with Operator(plane.kubeconfig, tmp_path) as operator:
        until(lambda: len(pool.children()) == CHILDREN, "the children")
        operator.terminate()


def test_only_the_leader_of_two_replicas_acts_and_the_other_takes_over(
    plane: Kubernetes, pool: Pool, tmp_path: Path
) -> None:
    first, second = (
        Operator(plane.kubeconfig, tmp_path / name, "--leader-elect", system=pool.namespace)
        for name in ("first", "second")
    )
    with first:
        until(lambda: "is now the leader" in first.log(), "the first leader")
        with second:
            until(lambda: "waiting for lease" in second.log(), "the follower")
            pool.apply(SIM)
            until(lambda: len(pool.children()) == CHILDREN, "the children")
            assert "applied" not in second.log()
            first.terminate()
            until(lambda: "is now the leader" in second.log(), "the second leader")
            pool.kubectl("delete", "service", "pool-router", "--wait=false")
            until(lambda: pool.child("Service", "router"), "the service")
