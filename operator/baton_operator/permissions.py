"""What the operator asks of the API, as rules of a Role: the chart's are checked against these.

In: the table of kinds. Out: rules. In the namespaces of pools and in the operator's own; of the
whole cluster only with none given, and then the definitions that kopf watches, too.
"""

from __future__ import annotations

import msgspec

from baton_operator.kinds import CHILDREN, EVENT, LEASE, POOL


class Rule(msgspec.Struct, frozen=True):
    """`resource` may have a subresource, as "inferencepools/status"."""

    group: str
    resource: str
    verbs: tuple[str, ...]


WATCHED = ("get", "list", "watch")
# create: a server-side apply that makes an object needs both.
MADE = (*WATCHED, "create", "patch", "delete")

# In every namespace with pools.
POOL_RULES = (
    Rule(POOL.group, POOL.plural, WATCHED),
    Rule(POOL.group, f"{POOL.plural}/status", ("patch",)),
    *(Rule(kind.group, kind.plural, MADE if kind.made else WATCHED) for kind in CHILDREN),
    Rule(EVENT.group, EVENT.plural, ("create",)),
)
# Where all namespaces are served, to notice a kind that is installed later.
CLUSTER_RULES = (Rule("apiextensions.k8s.io", "customresourcedefinitions", ("list", "watch")),)
# In the operator's own namespace, with leader election.
LEASE_RULES = (Rule(LEASE.group, LEASE.plural, ("get", "create", "update")),)
