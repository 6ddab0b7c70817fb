"""How many pods of a role somebody may evict at a time, as `kubectl drain` does.

One of each role stays, where there are more, or as many as `autoscaling` wants at least: an
eviction that would take one of them waits until the one before has its successor. Of a role with a
single pod nothing is kept, and `kubectl drain` never waits for a pod that cannot be: its requests
go on elsewhere, since an evicted node drains first. Pods that are not ready may always go. A budget
is of all revisions of its role.

In: a pool. Out: one PodDisruptionBudget per role, and one for the routers. Redis has none: each of
its servers is the only one of its kind, and does its work again from nothing.
"""

from __future__ import annotations

from baton_operator.api.pool import Pool
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.names import Component
from baton_protocol.store import Role


def build_budgets(pool: Pool) -> tuple[Manifest, ...]:
    spec = pool.spec
    return (
        _budget(pool, "prefill", spec.prefill.replicas, _least(pool, "prefill")),
        _budget(pool, "decode", spec.decode.replicas, _least(pool, "decode")),
        _budget(pool, "router", spec.router.replicas),
    )


def _least(pool: Pool, role: Role) -> int:
    scaling = pool.spec.autoscaling
    if scaling is None or scaling.mode != "auto" or scaling.is_external(role):
        return 1
    return scaling.bounds(role).min


def _budget(pool: Pool, component: Component, replicas: int, least: int = 1) -> Manifest:
    child = ChildIdentity(pool, component)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child.metadata(),
        "spec": {
            "minAvailable": max(0, min(least, replicas - 1)),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": child.selector()},
        },
    }
