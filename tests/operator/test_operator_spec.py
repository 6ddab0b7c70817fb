"""What may be written in a spec, and what is said about the rest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.pool import read_pool
from baton_operator.spec import ManagedStore, PoolSpec, SpecError, read_spec
from tests.support.manifests import IMAGES, sample

SIM: dict[str, Any] = {"engine": {"kind": "sim"}}


def external(index: Any = "redis://index", *data: Any) -> dict[str, Any]:
    return SIM | {"kvStore": {"external": {"indexUrl": index, "dataUrls": list(data)}}}


def managed(**fields: Any) -> dict[str, Any]:
    return SIM | {"kvStore": {"managed": fields}}


def test_a_pool_of_simulated_nodes_needs_one_line() -> None:
    spec = read_spec(SIM)
    assert (spec.prefill.replicas, spec.decode.replicas, spec.handoff) == (1, 1, "auto")
    assert spec.missing_role_policy == "aggregate"
    assert spec == read_spec(msgspec.to_builtins(spec))


REFUSED: list[tuple[str, Any, str]] = [
    ("no spec", None, "spec: None is wrong: expected `object`"),
    ("no model", {}, "spec.model.path: missing; write"),
    ("a relative path", {"model": {"path": "m/x"}}, "spec.model.path: 'm/x' is no absolute path"),
    ("a wrong kind", {"engine": {"kind": "vllm"}}, "spec.engine.kind: 'vllm' is wrong"),
    ("what kinds there are", {"engine": {"kind": "vllm"}}, "; write torch or sim"),
    ("a typo", SIM | {"prefil": {}}, "spec.prefil: there is no such field; known are model, "),
    ("a deep typo", SIM | {"decode": {"replica": 2}}, "spec.decode.replica: there is no such"),
    ("what was meant", managed(mem=1), "known are memory, dataInstances"),
    ("text for a number", SIM | {"prefill": {"replicas": "two"}}, "spec.prefill.replicas: 'two'"),
    ("true for a number", SIM | {"prefill": {"replicas": True}}, "spec.prefill.replicas: True"),
    ("less than nothing", SIM | {"decode": {"replicas": -1}}, "spec.decode.replicas: -1 is wrong"),
    (
        "nobody to answer",
        SIM | {"prefill": {"replicas": 0}, "decode": {"replicas": 0}},
        "spec.decode.replicas: 0, and prefill.replicas too",
    ),
    ("empty blocks", {"engine": {"kind": "sim", "blockSize": 0}}, "spec.engine.blockSize: 0 is"),
    ("a wrong hand-off", SIM | {"handoff": "maybe"}, "spec.handoff: 'maybe' is wrong"),
    ("a wrong policy", SIM | {"missingRolePolicy": "wait"}, "; write aggregate or queue or fail"),
    ("a size of ours", managed(memory="1GiB"), "spec.kvStore.managed.memory: '1GiB' is no"),
    ("a tiny store", managed(memory="1Mi"), "spec.kvStore.managed.memory: 1Mi is too small"),
    ("no instance", managed(dataInstances=0), "spec.kvStore.managed.dataInstances: 0 is wrong"),
    (
        "two stores",
        SIM | {"kvStore": {"managed": {}} | external("redis://i", "redis://d")["kvStore"]},
        "spec.kvStore.external: given beside managed",
    ),
    ("no data", external("redis://i"), "spec.kvStore.external.dataUrls: [] is wrong"),
    ("no URL", external("index:6379", "redis://d"), "spec.kvStore.external.indexUrl: Redis URL"),
    ("one for both", external("redis://i", "redis://i"), "spec.kvStore.external.dataUrls: index"),
    ("a number as URL", external("redis://i", "redis://d", 3), "external.dataUrls[1]: 3 is wrong"),
    ("a socket", external("unix:///run/r", "redis://d"), "no pod reaches unix:///run/r"),
    ("two in one", external("redis://i", "redis://a,redis://b"), "dataUrls[0]: there is a comma"),
    (
        "an index missing",
        SIM | {"kvStore": {"external": {"dataUrls": ["redis://d"]}}},
        "spec.kvStore.external.indexUrl: missing",
    ),
]


@pytest.mark.parametrize(
    ("spec", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_cannot_be_obeyed_is_refused_by_field_and_value(spec: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_spec(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        external("redis://:geheim@i", "redis://d"),
        external("redis://i", "redis://user:geheim@d"),
        SIM | {"kvStore": {"external": ["redis://:geheim@i"]}},
        SIM | {"kvStore": {"external": "redis://:geheim@i"}},
    ],
)
def test_a_password_is_refused_and_not_repeated(spec: Any) -> None:
    with pytest.raises(SpecError, match=r"spec\.kvStore\.external") as caught:
        read_spec(spec)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "size"),
    [("1Gi", 1 << 30), ("1.5Gi", 3 << 29), ("256M", 256 * 10**6), (1 << 27, 1 << 27)],
)
def test_memory_is_written_as_kubernetes_writes_quantities(written: int | str, size: int) -> None:
    assert ManagedStore(memory=written).memory_bytes == size


@pytest.mark.parametrize("name", ["Demo", "1st", "a.b", "a" * 41, "-a", "a-"])
def test_a_name_that_no_service_could_have_is_refused(name: str) -> None:
    resource = sample("sim")
    resource["metadata"]["name"] = name
    with pytest.raises(SpecError, match=r"metadata\.name: '"):
        read_pool(resource, IMAGES)


def test_a_schema_for_the_crd_follows_from_the_records() -> None:
    [schema], parts = msgspec.json.schema_components([PoolSpec])
    assert schema == {"$ref": "#/$defs/PoolSpec"}
    assert parts["RoleSpec"]["properties"]["replicas"]["minimum"] == 0
    assert not parts["PoolSpec"]["additionalProperties"]
