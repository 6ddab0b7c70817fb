"""Two operators of different installations over the same namespaces do not fight."""

from __future__ import annotations

import time
from pathlib import Path

from tests.cluster.machine.client import Kubernetes
from tests.cluster.operators import SIM, Body, Operator, Pool, until

QUIET_S = 5.0


def versions(pool: Pool) -> dict[str, str]:
    """What a write to any child would change."""
    return {
        name: str(body["metadata"].get("generation", "")) + str(body.get("spec", ""))
        for name, body in pool.children().items()
    }


def record(pool: Pool) -> Body:
    found: Body = pool.body().get("status", {}).get("operator", {})
    return found


def test_a_second_installation_leaves_pools_alone_and_both_say_so(
    plane: Kubernetes, pool: Pool, tmp_path: Path
) -> None:
    first = Operator(plane.kubeconfig, tmp_path / "first", system="team-a")
    # With another pull policy each would build other pods from the same spec.
    second = Operator(plane.kubeconfig, tmp_path / "second", "--pull-policy=Never", system="team-b")
    with first:
        pool.apply(SIM)
        until(lambda: pool.condition("Applied").get("status") == "True", "the first operator")
        before = versions(pool)
        with second:
            until(
                lambda: pool.condition("SoleOperator").get("reason") == "OtherOperator",
                "the condition",
            )
            time.sleep(QUIET_S)
            assert versions(pool) == before
            assert record(pool)["name"] == "team-a/baton-operator"
            message = pool.condition("SoleOperator")["message"]
            assert "operator team-a/baton-operator manages the pool" in message
            assert "operator team-b/baton-operator serves its namespace too" in message
            for reason in ("OtherOperator", "HeldByOther"):
                assert pool.events(reason) == [message], reason
            for one in (first, second):
                assert message in one.log()
            pool.patch({"decode": {"replicas": 2}})
            until(
                lambda: pool.child("Deployment", "decode")["spec"]["replicas"] == 2,
                "the first operator's edit",
            )
