"""The spec's `networkPolicy`: who may reach the pool's pods."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from baton_operator.api.cel import CelRule, ruled
from baton_operator.api.record import Record
from baton_operator.api.schema_extras import open_object

Peer = Annotated[
    dict[str, Any],
    ruled(
        CelRule(
            "has(self.podSelector) || has(self.namespaceSelector) || has(self.ipBlock)",
            "selects no peer; write podSelector, namespaceSelector or ipBlock, as in a "
            "NetworkPolicy",
        ),
        CelRule(
            "!has(self.ipBlock) || (!has(self.podSelector) && !has(self.namespaceSelector))",
            "must not be set together with a selector; write two peers, one with "
            "ipBlock and one with the selectors",
            field=".ipBlock",
        ),
        extra_json_schema=open_object(
            "NetworkPolicyPeer", "podSelector", "namespaceSelector", "ipBlock"
        ),
    ),
]


class NetworkPolicySpec(Record, frozen=True, kw_only=True):
    """Who may reach the pool's pods. The network plugin must enforce NetworkPolicies."""

    enabled: Annotated[bool, Meta(description="Create NetworkPolicies.")] = True
    clients: Annotated[
        tuple[Peer, ...],
        Meta(
            max_length=32,
            description="NetworkPolicyPeers that may reach the router. Empty: everyone may.",
        ),
    ] = ()
    monitoring: Annotated[
        tuple[Peer, ...],
        Meta(
            max_length=32,
            description="NetworkPolicyPeers that may reach /metrics of nodes and routers.",
        ),
    ] = ()
