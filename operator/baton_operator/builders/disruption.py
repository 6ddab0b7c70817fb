"""PodDisruptionBudgets, which limit how many pods of a role may be evicted at a time."""

from __future__ import annotations

from baton_operator.api.pool import Pool
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.names import Component
from baton_protocol.store import Role


def build_budgets(pool: Pool) -> tuple[Manifest, ...]:
    """One PodDisruptionBudget per role, and one for the routers.

    Of a role with several pods one stays, or the minimum of `autoscaling`: a further eviction waits
    until the previous pod has a ready successor. A single pod is not protected, so that
    `kubectl drain` never waits forever; an evicted node drains, and its requests continue
    elsewhere. Pods that are not ready may always be evicted. A budget covers all revisions of its
    role. Redis has none: each server is the only one of its kind, and its data can be computed
    again.
    """
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
