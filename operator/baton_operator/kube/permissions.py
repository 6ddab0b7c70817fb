"""The operator's API permissions as rules of a Role. A test compares the chart's with them.

In: the table of kinds. Out: rules for the namespaces of pools and for the operator's own. Without a
list of namespaces the rules apply to the whole cluster, plus those for the CRDs that kopf watches.
"""

from __future__ import annotations

import msgspec

from baton_operator.kube.kinds import (
    CHILDREN,
    EVENT,
    LEASE,
    POD,
    POOL,
    POOL_SCALER,
    SECRET,
    ObjectKind,
)
from baton_operator.names import OPERATOR

WATCHED = ("get", "list", "watch")
# A server-side apply that creates an object needs both create and patch.
MADE = (*WATCHED, "create", "patch", "delete")
# For the pool's own Secret; get also for those that the pool names. Garbage collection deletes it.
READ_BY_NAME = ("get", "create", "patch")
# To annotate pods that must go.
MARKED = (*WATCHED, "patch")


class PermissionRule(msgspec.Struct, frozen=True):
    """`resource` may include a subresource, as in "inferencepools/status". `names`: the objects to
    which the rule is restricted; empty for all."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()


def _verbs(kind: ObjectKind) -> tuple[str, ...]:
    if kind == POD:
        return MARKED
    if kind == SECRET:
        return READ_BY_NAME
    return MADE if kind.made else WATCHED


# In every namespace with pools.
POOL_RULES = (
    PermissionRule(POOL.group, POOL.plural, WATCHED),
    PermissionRule(POOL.group, f"{POOL.plural}/status", ("patch",)),
    *(PermissionRule(kind.group, kind.plural, _verbs(kind)) for kind in CHILDREN),
    PermissionRule(POOL_SCALER.group, f"{POOL_SCALER.plural}/status", ("patch",)),
    PermissionRule(EVENT.group, EVENT.plural, ("create", "list")),
)


# If all namespaces are served: kopf watches CRDs to notice a kind that is installed later.
CLUSTER_RULES = (
    PermissionRule("apiextensions.k8s.io", "customresourcedefinitions", ("list", "watch")),
)


# In the operator's own namespace, with leader election: the Lease has the installation's name. RBAC
# cannot restrict create to a name.
LEASE_RULES = (
    PermissionRule(LEASE.group, LEASE.plural, ("create",)),
    PermissionRule(LEASE.group, LEASE.plural, ("get", "update"), (OPERATOR,)),
)
