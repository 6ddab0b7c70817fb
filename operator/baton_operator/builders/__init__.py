"""Builds a pool's objects as manifests. Pure: the same pool gives the same manifests.

child         names, labels and owner of a pool's objects
overrides     merges a user's podTemplate over the built one
pods          what all pods share: security, probes, drain, flags as arguments
credentials   the pool's own secrets
store         the managed Redis servers
store_access  URLs, login and certificate of any store
nodes         one Deployment per role and revision
model         where a node finds its model
router        the routers' Deployment, Service, Ingress and HTTPRoute
scalers       PoolScalers
disruption    PodDisruptionBudgets
network       NetworkPolicies
"""

from __future__ import annotations

from collections.abc import Mapping

from baton_operator.api.pool import Pool
from baton_operator.builders.child import Manifest, NodeRevision
from baton_operator.builders.credentials import build_secret, credentials_of, new_credentials
from baton_operator.builders.disruption import build_budgets
from baton_operator.builders.network import build_network_policies
from baton_operator.builders.nodes import build_nodes, revision_of
from baton_operator.builders.router import build_router, build_router_service, build_routes
from baton_operator.builders.scalers import build_scalers
from baton_operator.builders.store import build_store
from baton_protocol.store import ROLES, Role

__all__ = [
    "Manifest",
    "NodeRevision",
    "build_pool",
    "build_secret",
    "credentials_of",
    "new_credentials",
    "revision_of",
]


def build_pool(
    pool: Pool, revision: str = "", replicas: Mapping[Role, int] | None = None
) -> tuple[Manifest, ...]:
    """All objects of the pool's current revision, in the order in which they must be applied.
    `replicas`: the number of nodes per role; default: the spec's. `revision` avoids computing it
    again."""
    if replicas is None:
        replicas = {role: pool.spec.role(role).replicas for role in ROLES}
    revision = revision or revision_of(pool).name
    nodes = [build_nodes(pool, role, revision, replicas[role]) for role in ROLES]
    nodes_s = max(node["spec"]["progressDeadlineSeconds"] for node in nodes)
    return (
        build_secret(pool),
        *build_scalers(pool),
        *build_network_policies(pool),
        *build_store(pool),
        *nodes,
        build_router(pool, nodes_s),
        build_router_service(pool),
        *build_routes(pool),
        *build_budgets(pool),
    )
