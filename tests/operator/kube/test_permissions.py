"""The operator's permissions: each resource once, by name, and no more than it needs.

tests/cluster/test_chart_rights.py checks that the chart grants them and that they are enough.
"""

from __future__ import annotations

from baton_operator.kube.permissions import CLUSTER_RULES, LEASE_RULES, POOL_RULES


def test_no_resource_is_listed_twice() -> None:
    rules = [
        (rule.group, rule.resource, rule.names)
        for rule in (*POOL_RULES, *CLUSTER_RULES, *LEASE_RULES)
    ]
    assert len(rules) == len(set(rules))


def test_pools_are_never_written_and_pods_only_patched() -> None:
    rules = {rule.resource: set(rule.verbs) for rule in POOL_RULES}
    assert rules["inferencepools"] == {"get", "list", "watch"}
    assert rules["pods"] == {"get", "list", "watch", "patch"}


def test_nothing_is_allowed_by_a_wildcard() -> None:
    for rule in (*POOL_RULES, *CLUSTER_RULES, *LEASE_RULES):
        assert "*" not in (rule.group, rule.resource, *rule.verbs)


def test_secrets_are_neither_listed_nor_watched_nor_deleted() -> None:
    for rule in (*POOL_RULES, *CLUSTER_RULES, *LEASE_RULES):
        if rule.resource == "secrets":
            assert set(rule.verbs) == {"get", "create", "patch"}
