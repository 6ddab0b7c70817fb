"""The list of permissions against what the operator's modules really ask for."""

from __future__ import annotations

from baton_operator.kinds import CHILDREN, POOL
from baton_operator.permissions import CLUSTER_RULES, LEASE_RULES, POOL_RULES


def test_no_resource_is_listed_twice() -> None:
    rules = [(rule.group, rule.resource) for rule in (*POOL_RULES, *CLUSTER_RULES, *LEASE_RULES)]
    assert len(rules) == len(set(rules))


def test_every_watched_kind_may_be_watched() -> None:
    rules = {(rule.group, rule.resource): rule.verbs for rule in POOL_RULES}
    for kind in (*CHILDREN, POOL):
        assert {"get", "list", "watch"} <= set(rules[kind.group, kind.plural])


def test_pools_and_pods_are_never_written() -> None:
    rules = {rule.resource: set(rule.verbs) for rule in POOL_RULES}
    assert rules["inferencepools"] == rules["pods"] == {"get", "list", "watch"}


def test_nothing_is_allowed_by_a_wildcard() -> None:
    for rule in (*POOL_RULES, *CLUSTER_RULES, *LEASE_RULES):
        assert "*" not in (rule.group, rule.resource, *rule.verbs)
