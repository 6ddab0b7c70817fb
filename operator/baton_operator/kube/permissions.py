"""What the operator asks of the API, as rules of a Role: the chart's are checked against these.

In: the table of kinds. Out: rules. In the namespaces of pools and in the operator's own; of the
whole cluster only with none given, and then the definitions that kopf watches, too.
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
from baton_operator.kube.lease import NAME as LEASE_NAME


class PermissionRule(msgspec.Struct, frozen=True):
    """`resource` may have a subresource, as "inferencepools/status". `names`: only of objects with
    these names; empty for all."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()


WATCHED = ("get", "list", "watch")
# create: a server-side apply that makes an object needs both.
MADE = (*WATCHED, "create", "patch", "delete")
# Of the pool's own Secret, and get of those that the pool names. No delete: it goes with its pool.
READ_BY_NAME = ("get", "create", "patch")
# To mark those that are to go.
MARKED = (*WATCHED, "patch")


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
# Where all namespaces are served, to notice a kind that is installed later.
CLUSTER_RULES = (
    PermissionRule("apiextensions.k8s.io", "customresourcedefinitions", ("list", "watch")),
)
# In the operator's own namespace, with leader election. RBAC cannot restrict create to a name.
LEASE_RULES = (
    PermissionRule(LEASE.group, LEASE.plural, ("create",)),
    PermissionRule(LEASE.group, LEASE.plural, ("get", "update"), (LEASE_NAME,)),
)
