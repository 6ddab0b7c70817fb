"""Evaluates NetworkPolicies: which pods may connect to which. Pure.

In: ingress policies, pods with namespaces and labels. Out: yes or no, by Kubernetes' documentation.
Only the fields that a pool's manifests use are supported; others raise KeyError or AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A pod as policies see it. Each namespace is assumed to have its name as a label."""

    namespace: str
    labels: Mapping[str, str]


def may_connect(policies: Iterable[dict[str, Any]], source: Place, to: Place, port: int) -> bool:
    """Whether `source` may connect to a port of `to`. A pod that no policy selects accepts all
    connections; otherwise one rule of one policy must allow it."""
    selecting = [policy for policy in policies if _selects(policy, to)]
    return not selecting or any(
        _allows(rule, policy["metadata"]["namespace"], source, port)
        for policy in selecting
        for rule in policy["spec"]["ingress"]
    )


def _selects(policy: dict[str, Any], pod: Place) -> bool:
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    same = policy["metadata"]["namespace"] == pod.namespace
    return same and matches(policy["spec"]["podSelector"], pod.labels)


def _allows(rule: dict[str, Any], namespace: str, source: Place, port: int) -> bool:
    assert rule.keys() <= {"from", "ports"}
    peers, ports = rule.get("from", ()), rule.get("ports", ())
    to_port = not ports or {"protocol": "TCP", "port": port} in ports
    return to_port and (not peers or any(_is_peer(peer, namespace, source) for peer in peers))


def _is_peer(peer: dict[str, Any], namespace: str, source: Place) -> bool:
    """Whether the source matches both selectors of a peer. Without a namespaceSelector, the peer is
    in the policy's namespace."""
    assert peer, "an empty peer selects nothing"
    assert peer.keys() <= {"namespaceSelector", "podSelector"}
    if "namespaceSelector" in peer:
        names = {"kubernetes.io/metadata.name": source.namespace}
        inside = matches(peer["namespaceSelector"], names)
    else:
        inside = source.namespace == namespace
    return inside and matches(peer.get("podSelector", {}), source.labels)


def matches(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
