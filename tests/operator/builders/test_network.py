"""The NetworkPolicies, as a table of which pods may connect to which. No test checks that a network
enforces them: the test cluster's bridge does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.api.pool import Pool
from baton_operator.builders import build_pool
from tests.support.kubernetes.manifests import INSTALLATION, sample_pool, template_of
from tests.support.kubernetes.network_policies import Place, may_connect

PORTS = {"router": 8000, "prefill": 9000, "decode": 9000, "kv-index": 6379, "kv-data": 6379}
OPERATOR = {"app.kubernetes.io/name": "baton-operator"}
OUTSIDE = {
    "client": Place("apps", {}),
    "stranger": Place("elsewhere", {"app": "prometheus"}),
    "neighbour": Place("serving", {"baton.dev/pool": "other", "baton.dev/component": "router"}),
    "operator": Place("baton-system", OPERATOR),
    "beside the operator": Place("baton-system", {}),
    "false operator": Place("elsewhere", OPERATOR),
    "prometheus": Place("monitoring", {"app": "prometheus"}),
    "beside prometheus": Place("monitoring", {}),
}

NAMED = """
                     router prefill decode kv-index kv-data
client               yes    -       -      -        -
stranger             -      -       -      -        -
neighbour            -      -       -      -        -
operator             yes    -       -      yes      -
beside the operator  -      -       -      -        -
false operator       -      -       -      -        -
prometheus           yes    yes     yes    -        -
beside prometheus    -      -       -      -        -
router               -      yes     yes    yes      -
prefill              -      -       -      yes      yes
decode               -      -       -      yes      yes
kv-index             -      -       -      -        -
kv-data              -      -       -      -        -
"""
OPEN = """
                     router prefill decode kv-index kv-data
client               yes    -       -      -        -
stranger             yes    -       -      -        -
neighbour            yes    -       -      -        -
operator             yes    -       -      yes      -
beside the operator  yes    -       -      -        -
false operator       yes    -       -      -        -
prometheus           yes    -       -      -        -
beside prometheus    yes    -       -      -        -
router               yes    yes     yes    yes      -
prefill              yes    -       -      yes      yes
decode               yes    -       -      yes      yes
kv-index             yes    -       -      -        -
kv-data              yes    -       -      -        -
"""


def table(pool: Pool, port_offset: int = 0) -> list[list[str]]:
    """Return a row for each source and a column for each component of the pool, on its own port."""
    manifests = build_pool(pool)
    own = {
        labels["baton.dev/component"]: Place(pool.namespace, labels)
        for template in map(template_of, manifests)
        if template is not None
        for labels in [template["metadata"]["labels"]]
    }
    policies = [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    targets = [name for name in PORTS if name in own]
    rows = [["", *targets]]
    for source, place in (OUTSIDE | {name: own[name] for name in targets}).items():
        cells = [
            "yes" if may_connect(policies, place, own[name], PORTS[name] + port_offset) else "-"
            for name in targets
        ]
        rows.append([source, *cells])
    return rows


def parsed(text: str) -> list[list[str]]:
    header, *lines = text.strip("\n").splitlines()
    rows = [line.rsplit(maxsplit=len(header.split())) for line in lines]
    return [["", *header.split()], *rows]


def test_named_clients_and_monitoring_exclude_everyone_else() -> None:
    assert table(sample_pool("claim")) == parsed(NAMED)


def test_without_named_clients_everyone_may_connect_to_the_router() -> None:
    assert table(sample_pool("sim")) == parsed(OPEN)


def test_no_other_port_is_open() -> None:
    for row in table(sample_pool("claim"), port_offset=1)[1:]:
        assert set(row[1:]) == {"-"}, row


def test_nodes_of_an_old_revision_keep_their_connections() -> None:
    pool = sample_pool("sim")
    policies = [one for one in build_pool(pool) if one["kind"] == "NetworkPolicy"]
    old, router = (
        {"baton.dev/pool": pool.name, "baton.dev/component": component, "baton.dev/revision": "old"}
        for component in ("decode", "router")
    )
    node = Place(pool.namespace, old)
    index = Place(pool.namespace, old | {"baton.dev/component": "kv-index"})
    assert may_connect(policies, Place(pool.namespace, router), node, PORTS["decode"])
    assert not may_connect(policies, OUTSIDE["client"], node, PORTS["decode"])
    assert may_connect(policies, node, index, PORTS["kv-index"])


def test_an_operator_outside_the_cluster_gets_no_rule() -> None:
    pool = sample_pool("claim", msgspec.structs.replace(INSTALLATION, namespace=""))
    rows = {row[0]: row[1:] for row in table(pool)}
    assert set(rows["operator"]) == {"-"}
    assert rows["client"] == ["yes", "-", "-", "-", "-"]


def test_an_external_redis_gets_no_policy() -> None:
    kinds = [(one["kind"], one["metadata"]["name"]) for one in build_pool(sample_pool("external"))]
    assert [name for kind, name in kinds if kind == "NetworkPolicy"] == [
        "alone-router",
        "alone-prefill",
        "alone-decode",
    ]


@pytest.mark.parametrize("peers", [(), ({"podSelector": {}},)])
def test_no_policy_is_built_when_they_are_disabled(peers: tuple[dict[str, Any], ...]) -> None:
    pool = sample_pool("sim", networkPolicy={"enabled": False, "clients": list(peers)})
    assert not [one for one in build_pool(pool) if one["kind"] == "NetworkPolicy"]
