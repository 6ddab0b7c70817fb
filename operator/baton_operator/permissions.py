"""What the operator asks of the API, as rules of a Role: the chart's are checked against these.

In: the table of kinds. Out: rules. In the namespaces of pools and in the operator's own; of the
whole cluster only with none given, and then the definitions that kopf watches, too.
"""

from __future__ import annotations

import msgspec

from baton_operator.kinds import CHILDREN, EVENT, LEASE, POD, POOL, POOL_SCALER, Kind


class Rule(msgspec.Struct, frozen=True):
    """`resource` may have a subresource, as "inferencepools/status"."""

    group: str
    resource: str
    verbs: tuple[str, ...]


WATCHED = ("get", "list", "watch")
# create: a server-side apply that makes an object needs both.
MADE = (*WATCHED, "create", "patch", "delete")
# To mark those that are to go.
MARKED = (*WATCHED, "patch")


def _verbs(kind: Kind) -> tuple[str, ...]:
    if kind == POD:
        return MARKED
    return MADE if kind.made else WATCHED


# In every namespace with pools.
POOL_RULES = (
    Rule(POOL.group, POOL.plural, WATCHED),
    Rule(POOL.group, f"{POOL.plural}/status", ("patch",)),
    *(Rule(kind.group, kind.plural, _verbs(kind)) for kind in CHILDREN),
    Rule(POOL_SCALER.group, f"{POOL_SCALER.plural}/status", ("patch",)),
    Rule(EVENT.group, EVENT.plural, ("create",)),
)
# Where all namespaces are served, to notice a kind that is installed later.
CLUSTER_RULES = (Rule("apiextensions.k8s.io", "customresourcedefinitions", ("list", "watch")),)
# In the operator's own namespace, with leader election.
LEASE_RULES = (Rule(LEASE.group, LEASE.plural, ("get", "create", "update")),)
