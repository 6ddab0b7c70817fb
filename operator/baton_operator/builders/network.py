"""Which pods may connect to which, for network plugins that enforce it.

    clients (everyone, unless named)  -> router        router             -> nodes
    operator, monitoring              -> router        monitoring         -> nodes
    router, nodes, operator           -> kv-index      nodes              -> kv-data

In: a pool. Out: one NetworkPolicy per component, for ingress only. The nodes of a pool never
connect to each other. Egress (hubs, DNS, an external Redis) is left to the cluster's administrator.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_kvstore.connection.endpoint import DEFAULT_PORT
from baton_operator.api.pool import Pool
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.builders.overrides import copy_without_nulls
from baton_operator.names import COMPONENT_LABEL, NODE_PORT, POOL_LABEL, ROUTER_PORT, Component
from baton_protocol.store import ROLES

OPERATOR_APP = "baton-operator"  # its pods' app.kubernetes.io/name


def build_network_policies(pool: Pool) -> tuple[Manifest, ...]:
    spec = pool.spec.network_policy
    if not spec.enabled:
        return ()
    router, nodes = _pods(pool, "router"), _pods(pool, *ROLES)
    operator, monitoring = _operator(pool), list(spec.monitoring)
    # An empty list of peers allows everyone.
    callers = [*spec.clients, *operator, *monitoring] if spec.clients else []
    policies = [_policy(pool, "router", ROUTER_PORT, callers)]
    policies += [_policy(pool, role, NODE_PORT, [router, *monitoring]) for role in ROLES]
    if pool.spec.kv_store.owned is not None:
        policies += [
            _policy(pool, "kv-index", DEFAULT_PORT, [router, nodes, *operator]),
            _policy(pool, "kv-data", DEFAULT_PORT, [nodes]),
        ]
    return tuple(policies)


def _policy(pool: Pool, component: Component, port: int, callers: Sequence[Manifest]) -> Manifest:
    child = ChildIdentity(pool, component)
    rule = {
        **({"from": copy_without_nulls(callers)} if callers else {}),
        "ports": [{"protocol": "TCP", "port": port}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child.metadata(),
        # Pods of all revisions and instances.
        "spec": {
            "podSelector": {"matchLabels": child.selector()},
            "policyTypes": ["Ingress"],
            "ingress": [rule],
        },
    }


def _pods(pool: Pool, *components: Component) -> Manifest:
    chosen = {"key": COMPONENT_LABEL, "operator": "In", "values": list(components)}
    selector = {"matchLabels": {POOL_LABEL: pool.name}, "matchExpressions": [chosen]}
    return {"podSelector": selector}


def _operator(pool: Pool) -> list[Manifest]:
    """The operator's pods; empty if the operator runs outside the cluster."""
    namespace = pool.installation.namespace
    if not namespace:
        return []
    return [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": OPERATOR_APP}},
        }
    ]
