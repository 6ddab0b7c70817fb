"""Hints about valid specs that do not do what their authors expect."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.kube.objects import Body
from baton_operator.state.cache import PoolKey
from baton_operator.state.hosts import shared_hosts
from baton_operator.state.observed import SharedHost
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner.observations import condition_of, observed, status_of, verdict

GPU = "nvidia.com/gpu"
TORCH = {"kind": "torch"}
MODEL = {"path": "/models/m"}


def role(limits: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"resources": {"limits": limits}} | more


def in_template(container: str, limits: dict[str, Any]) -> dict[str, Any]:
    one = {"name": container, "image": "i", "resources": {"limits": limits}}
    return {"podTemplate": {"spec": {"containers": [one]}}}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"decode": role({GPU: 2})}, "spec.decode.resources.limits: a node has 2 GPUs and uses 1"),
        ({"prefill": role({GPU: "8"})}, "spec.prefill.resources.limits: a node has 8 GPUs"),
        ({"decode": role({"amd.com/gpu": 2})}, "a node has 2 GPUs"),
        ({"decode": role({"nvidia.com/mig-1g.5gb": 3})}, "a node has 3 GPUs"),
        ({"decode": in_template("node", {GPU: 4})}, "spec.decode.resources.limits: a node has 4"),
        ({"decode": role({GPU: 1}), "engine": {"kind": "sim"}}, "a node has 1 GPUs and uses 0"),
        ({"decode": role({GPU: 1}), "prefill": role({GPU: 1})}, ""),
        ({"decode": role({GPU: 1}, **in_template("sidecar", {GPU: 1}))}, ""),
        ({"decode": role({"cpu": 8})}, ""),
    ],
)
def test_gpus_that_no_node_uses_are_a_hint_that_names_the_field(
    spec: dict[str, Any], words: str
) -> None:
    pool = sample_pool("sim", **({"engine": TORCH, "model": MODEL} | spec))
    status = status_of(observed(pool), pool)
    expected = ("False", "GpusUnused") if words else ("True", "FullEffect")
    assert verdict(status, "SpecEffective") == expected
    assert words in condition_of(status, "SpecEffective").message
    assert verdict(status, "Ready") == ("True", "AllReady")


def ingress(host: str, class_name: str = "") -> dict[str, Any]:
    return {"router": {"ingress": {"host": host, "className": class_name}}}


def route(host: str, gate: str = "gate", **place: Any) -> dict[str, Any]:
    parents = [{"name": gate, **place}]
    return {"router": {"httpRoute": {"parentRefs": parents, "hostnames": [host, "own.example"]}}}


MINE, THEIRS = PoolKey("a", "mine"), PoolKey("b", "theirs")


@pytest.mark.parametrize(
    ("mine", "theirs", "hosts"),
    [
        (ingress("a.example"), ingress("a.example"), ["a.example"]),
        (ingress("a.example"), ingress("b.example"), []),
        (ingress("a.example", "nginx"), ingress("a.example", "nginx"), ["a.example"]),
        (ingress("a.example", "nginx"), ingress("a.example", "haproxy"), []),
        (ingress("a.example"), route("a.example"), []),
        (route("a.example", namespace="g"), route("b.example", namespace="g"), ["own.example"]),
        (route("a.example"), route("a.example"), []),  # Gateways of two namespaces
        (route("a.example"), route("a.example", namespace="a"), ["a.example", "own.example"]),
        ({}, ingress("a.example"), []),
        (ingress("a.example"), {"router": {"ingress": "broken"}}, []),
        (ingress("a.example"), None, []),
    ],
)
def test_two_pools_with_one_host_name_see_each_other(
    mine: Body, theirs: Body | None, hosts: list[str]
) -> None:
    specs: dict[PoolKey, Any] = {MINE: mine, THEIRS: theirs}
    assert [(shared.host, shared.pool) for shared in shared_hosts(MINE, specs)] == [
        (host, "b/theirs") for host in hosts
    ]
    assert [(shared.host, shared.pool) for shared in shared_hosts(THEIRS, specs)] == [
        (host, "a/mine") for host in hosts
    ]


def test_a_shared_host_is_a_hint_that_names_the_field_and_the_other_pool() -> None:
    shared = SharedHost(field="spec.router.ingress.host", host="a.example", pool="b/theirs")
    status = status_of(observed(shared_hosts=(shared,)))
    assert verdict(status, "SpecEffective") == ("False", "HostShared")
    words = "spec.router.ingress.host: pool b/theirs routes a.example too"
    assert condition_of(status, "SpecEffective").message == words
