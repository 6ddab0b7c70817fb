"""What a pool consists of, as manifests. Pure: the same pool gives the same manifests.

child   names, labels and owner of whatever a pool owns; nobody else spells them
pods    what all pods share: ports, probes, drain, flags as arguments
nodes   one Deployment per role and revision, and what a revision is
router  the gateway's Deployment and Service
store   the managed Redis servers, and the store's URLs whoever owns it
"""

from __future__ import annotations

from baton_operator.builders.child import Manifest
from baton_operator.builders.nodes import ROLES, build_nodes
from baton_operator.builders.router import build_router, build_router_service
from baton_operator.builders.store import build_store
from baton_operator.pool import Pool


def build_pool(pool: Pool) -> tuple[Manifest, ...]:
    """Everything a pool owns in its current revision, in the order in which it is needed."""
    return (
        *build_store(pool),
        *(build_nodes(pool, role) for role in ROLES),
        build_router(pool),
        build_router_service(pool),
    )
