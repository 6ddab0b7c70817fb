"""Server-side apply by several field managers, in a real API server: which manager owns what."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from baton_operator.api.crd import crd
from tests.cluster.applied_pools import Json, apply, pool, write_status
from tests.cluster.crd_cases import DATA, SIM, external
from tests.cluster.machine.client import CommandFailed, Kubernetes

# Other fields that paths in ATOMIC require.
REQUIRED: dict[str, Json] = {
    "model.secretRef": {"model": {"uri": "hf://a/b"}},
    "autoscaling.schedules": {"autoscaling": {"mode": "external"}},
    "kvStore.external": {"kvStore": {"external": {"indexUrl": "redis://index"}}},
}
DUPLICATES = (
    ("router.httpRoute.parentRefs", [{"name": "a"}, {"name": "a", "namespace": ""}]),
    ("router.httpRoute", {"parentRefs": [{"name": "a"}], "hostnames": ["a.b", "a.b"]}),
)


def value_at(value: Any, path: str) -> Any:
    for step in path.split("."):
        value = value.get(step)
        if value is None:
            return None
    return value


def spec_with(path: str, value: Any) -> Json:
    """A spec with only this value at this path."""
    for step in reversed(path.split(".")):
        value = {step: value}
    spec: Json = value
    return spec


class Merged(NamedTuple):
    """A list to which two managers apply one item each."""

    path: str
    first: Any
    second: Any


def team(name: str) -> Json:
    return {"namespaceSelector": {"matchLabels": {"team": name}}}


MERGED = (
    Merged(
        "router.httpRoute.parentRefs",
        {"name": "public", "namespace": "gateways", "sectionName": ""},
        {"name": "public", "namespace": "gateways", "sectionName": "internal"},
    ),
    Merged("router.httpRoute.hostnames", "a.example.com", "b.example.com"),
)


def spec_with_required(case: Merged, items: list[Any]) -> Json:
    """A spec with the case's list and the fields that the list requires."""
    spec = spec_with(case.path, items)
    if case.path == "router.httpRoute.hostnames":
        spec["router"]["httpRoute"]["parentRefs"] = [{"name": "public"}]
    return spec


@pytest.mark.parametrize("case", MERGED, ids=lambda case: case.path)
def test_two_managers_of_a_list_each_own_only_their_items(
    plane: Kubernetes, namespace: str, case: Merged
) -> None:
    apply(plane, namespace, "platform", SIM | spec_with_required(case, [case.first]))
    both = apply(plane, namespace, "team", spec_with_required(case, [case.second]))
    assert value_at(both, case.path) == [case.first, case.second]
    left = apply(plane, namespace, "platform", SIM)
    assert value_at(left, case.path) == [case.second]


ATOMIC = (
    ("engine.extraArgs", ["--a=1"], ["--b=2"]),
    ("router.extraArgs", ["--a=1"], ["--b=2"]),
    ("kvStore.external", external()["kvStore"]["external"], {"dataUrls": DATA[:1]}),
    ("networkPolicy.clients", [team("search")], [team("chat")]),
    ("networkPolicy.monitoring", [team("search")], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]),
    ("model.secretRef", {"name": "a"}, {"name": "b"}),
    ("router.apiKeysSecret", {"name": "a", "key": "x"}, {"name": "b", "key": "x"}),
    (
        "autoscaling.schedules",
        [{"from": "08:00", "to": "18:00"}],
        [{"from": "09:00", "to": "17:00"}],
    ),
)


@pytest.mark.parametrize(("path", "first", "second"), ATOMIC, ids=[path for path, *_ in ATOMIC])
def test_an_atomic_field_has_one_manager_and_a_conflict_names_it(
    plane: Kubernetes, namespace: str, path: str, first: Any, second: Any
) -> None:
    required = SIM | REQUIRED.get(path, {})
    apply(plane, namespace, "platform", merged(required, spec_with(path, first)))
    with pytest.raises(CommandFailed) as caught:
        apply(plane, namespace, "team", spec_with(path, second))
    assert "platform" in caught.value.error
    assert f".spec.{path}" in caught.value.error
    with_required = merged(REQUIRED.get(path, {}), spec_with(path, second))
    forced = apply(plane, namespace, "team", with_required, "--force-conflicts")
    stored = value_at(forced, path)
    if isinstance(second, dict):
        stored = {key: stored[key] for key in second}
    if path == "autoscaling.schedules":
        stored = [{key: one[key] for key in ("from", "to")} for one in stored]
    assert stored == second


def merged(one: Json, other: Json) -> Json:
    result = dict(one)
    for key, value in other.items():
        known = result.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            value = merged(known, value)
        result[key] = value
    return result


@pytest.mark.parametrize(("path", "value"), DUPLICATES, ids=[path for path, _ in DUPLICATES])
def test_duplicate_items_of_a_shared_list_are_refused(
    plane: Kubernetes, namespace: str, path: str, value: Any
) -> None:
    body = pool("demo", SIM | spec_with(path, value))
    with pytest.raises(CommandFailed) as caught:
        plane.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(body))
    assert "Duplicate value" in caught.value.error


@pytest.mark.parametrize(
    ("status", "field"),
    [
        ({"model": {"progressTime": "yesterday"}}, "progressTime"),
        ({"model": {"progressTime": ""}}, "progressTime"),
        (
            {"conditions": [{"type": "Ready", "status": "True", "reason": "AllReady"}]},
            "message",
        ),
        ({"prefill": {"ready": -1}}, "status.prefill.ready"),
    ],
)
def test_a_malformed_status_is_refused(
    plane: Kubernetes, namespace: str, status: Json, field: str
) -> None:
    apply(plane, namespace, "platform", SIM)
    with pytest.raises(CommandFailed) as caught:
        write_status(plane, namespace, status)
    assert field in caught.value.error


def test_a_condition_has_the_fields_of_kubernetes_conditions(plane: Kubernetes) -> None:
    document = json.loads(plane.kubectl("get", "--raw", "/openapi/v3/apis/policy/v1"))
    theirs = document["components"]["schemas"]["io.k8s.apimachinery.pkg.apis.meta.v1.Condition"]
    status = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    ours = status["properties"]["conditions"]["items"]
    assert sorted(ours["required"]) == sorted(theirs["required"])
    assert set(ours["properties"]) == set(theirs["properties"])
    for name, field in ours["properties"].items():
        assert field["type"] == theirs["properties"][name].get("type", "string"), name
