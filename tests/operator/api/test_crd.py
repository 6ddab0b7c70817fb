"""The generated CustomResourceDefinitions: form, completeness and the copies in the chart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_operator.api.crd import (
    COLUMNS,
    DEFINITIONS,
    SCALER_COLUMNS,
    WIDE,
    crd,
    helm_template,
    scaler_crd,
)
from baton_operator.api.schema import Schema
from baton_operator.api.spec import PoolSpec
from baton_operator.api.spec_reader import read_spec
from baton_operator.status.conditions import KINDS

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = ROOT / "charts" / "baton" / "templates"
# Fields with any content: Kubernetes validates them where they are used.
OPEN = re.compile(r".*\.podTemplate\.(metadata|spec)|spec\.networkPolicy\.\w+\[\]\.\w+")
SIM = {"engine": {"kind": "sim"}}


def schema_in(definition: dict[str, Any]) -> Schema:
    [version] = definition["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    return schema


def resource() -> Schema:
    return schema_in(crd())


def walk(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield each schema with its path; the path of items ends in `[]`, of map values in `[*]`."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from walk(schema["additionalProperties"], f"{path}[*]")


NODES = [
    found for part in ("spec", "status") for found in walk(resource()["properties"][part], part)
]
SCALER_NODES = [
    (f"scaler.{path}", found)
    for part in ("spec", "status")
    for path, found in walk(schema_in(scaler_crd())["properties"][part], part)
]
ALL_NODES = NODES + SCALER_NODES
# The lists that server-side apply merges, with their keys. All others belong to one applier: their
# order matters, or their items have no key.
MERGED = {
    "spec.router.httpRoute.parentRefs": ["name", "namespace", "sectionName"],
    "spec.router.httpRoute.hostnames": "set",
    "spec.model.aliases": "set",
    "status.conditions": ["type"],
}


@pytest.mark.parametrize("plural", DEFINITIONS)
def test_the_chart_s_copy_equals_the_generated_definition(plural: str) -> None:
    copy = f"crd-{plural}.yaml"
    assert (TEMPLATES / copy).read_text() == helm_template(plural), (
        f"regenerate it: python -m baton_operator.api.crd {plural} > charts/baton/templates/{copy}"
    )


@pytest.mark.parametrize("plural", DEFINITIONS)
def test_the_definition_survives_an_uninstall_and_is_optional(plural: str) -> None:
    metadata = DEFINITIONS[plural]()["metadata"]
    assert metadata["name"] == f"{plural}.baton.dev"
    assert metadata["annotations"]["helm.sh/resource-policy"] == "keep"
    _, condition, *_, end = helm_template(plural).splitlines()
    assert (condition, end) == ("{{- if .Values.crds.install }}", "{{- end }}")


def test_the_paths_and_columns_of_a_scaler_exist_in_its_schema() -> None:
    [version] = scaler_crd()["spec"]["versions"]
    paths = {path.removeprefix("scaler") for path, _ in SCALER_NODES}
    scale = version["subresources"]["scale"]
    assert {*scale.values(), *SCALER_COLUMNS.values()} <= paths
    assert dict(SCALER_NODES)["scaler.spec"]["required"] == ["replicas"]


def test_the_schema_is_structural() -> None:
    known = {"type", "description", "default", "properties", "required", "items", "enum", "format"}
    known |= {"additionalProperties", "minimum", "maximum", "minItems", "maxItems", "maxLength"}
    known |= {"maxProperties", "minLength", "pattern"}
    for path, schema in ALL_NODES:
        mixed = schema.get("x-kubernetes-int-or-string", False)
        assert ("type" in schema) != mixed, path
        unknown = {key for key in schema if not key.startswith("x-kubernetes-")} - known
        assert not unknown, path
        is_open = "x-kubernetes-preserve-unknown-fields" in schema
        assert is_open == (OPEN.fullmatch(path) is not None), path


def test_every_field_is_described() -> None:
    undescribed = [path for path, schema in ALL_NODES if not schema.get("description")]
    assert [path for path in undescribed if not path.endswith("]")] == []


def test_every_description_is_a_sentence() -> None:
    texts = [(path, one["description"]) for path, one in ALL_NODES if "description" in one]
    sentence = re.compile(r"[A-Z].*\.", re.DOTALL)
    assert [path for path, text in texts if not sentence.fullmatch(text)] == []


def test_the_description_of_an_enumeration_mentions_each_value() -> None:
    found = [(path, one) for path, one in ALL_NODES if "enum" in one and not path.endswith("]")]
    assert len(found) > 10
    for path, schema in found:
        undescribed = [value for value in schema["enum"] if value not in schema["description"]]
        assert undescribed == [], path


def test_every_time_in_a_status_is_a_date_time() -> None:
    times = {path for path, schema in ALL_NODES if schema.get("format") == "date-time"}
    assert times == {
        "status.conditions[].lastTransitionTime",
        "status.model.progressTime",
        "status.autoscaling.since",
        "status.autoscaling.time",
        "status.operator.time",
        "status.operator.otherTime",
    }
    named = {
        path
        for path, schema in ALL_NODES
        if re.search(r"([Tt]ime|[Ss]ince|[Uu]ntil)$", path) and schema.get("type") == "string"
    }
    assert named == times


def test_integers_have_the_kubernetes_format_and_are_never_negative() -> None:
    for path, schema in ALL_NODES:
        if schema.get("type") == "integer":
            is_generation = path.endswith("observedGeneration")
            assert schema["format"] == ("int64" if is_generation else "int32"), path
            assert schema["minimum"] >= 0, path


def test_strings_lists_and_maps_of_a_spec_are_bounded() -> None:
    for path, schema in ALL_NODES:
        if "status" in path:
            continue
        match schema.get("type"):
            case "string" if "enum" not in schema:
                assert "maxLength" in schema, path
            case "array":
                assert "maxItems" in schema, path
            case "object" if "additionalProperties" in schema:
                assert "maxProperties" in schema, path


def test_every_list_says_how_server_side_apply_merges_it() -> None:
    lists = {path: schema for path, schema in ALL_NODES if schema.get("type") == "array"}
    strategies = {
        path: schema.get("x-kubernetes-list-map-keys", schema.get("x-kubernetes-list-type"))
        for path, schema in lists.items()
    }
    assert strategies == dict.fromkeys(lists, "atomic") | MERGED
    for path, merged in MERGED.items():
        items = lists[path]["items"]
        if merged == "set":
            assert items["type"] == "string", path
        for key in merged if isinstance(merged, list) else ():
            assert lists[path]["x-kubernetes-list-type"] == "map"
            assert key in items["required"] or "default" in items["properties"][key], path


def test_a_secret_reference_is_atomic_in_server_side_apply() -> None:
    secrets = [
        (path, schema)
        for path, schema in ALL_NODES
        if re.search(r"[sS]ecret(Ref)?$", path) and schema["type"] == "object"
    ]
    assert len(secrets) == 4
    for path, schema in secrets:
        assert schema["x-kubernetes-map-type"] == "atomic", path


def test_the_message_of_every_rule_says_what_to_write() -> None:
    rules = [
        (path, rule)
        for path, schema in [("", resource()), *NODES]
        for rule in schema.get("x-kubernetes-validations", [])
    ]
    assert len(rules) > 40
    for path, rule in rules:
        assert "write " in rule["message"], path


def filled(schema: Schema, value: Any) -> Any:
    """Return the value with the schema's defaults filled in, as the API server does."""
    if schema.get("type") != "object" or "properties" not in schema:
        return value
    found = dict(value)
    for name, inner in schema["properties"].items():
        if "default" in inner:
            found.setdefault(name, inner["default"])
        if name in found:
            found[name] = filled(inner, found[name])
    return found


@pytest.mark.parametrize(
    "spec",
    [
        SIM,
        SIM | {"kvStore": {"managed": {}}, "router": {"ingress": {"host": "a.example"}}},
        SIM | {"prefill": {"replicas": 0}, "networkPolicy": {"enabled": False}, "paused": True},
    ],
)
def test_the_defaults_of_the_schema_do_not_change_a_pool(spec: dict[str, Any]) -> None:
    whole = filled(resource()["properties"]["spec"], spec)
    assert whole != spec
    assert read_spec(whole) == read_spec(spec)


def test_informative_defaults_are_in_the_schema() -> None:
    whole = filled(resource()["properties"]["spec"], {})
    assert whole["engine"] == {"kind": "torch", "dtype": "auto", "blockSize": 16}
    assert whole["router"] == {
        "replicas": 1,
        "placement": "cost",
        "service": {"type": "ClusterIP", "port": 8000},
    }
    assert "model" not in whole


def test_a_status_has_no_defaults() -> None:
    assert [path for path, schema in NODES if path[:6] == "status" and "default" in schema] == []


def test_every_field_of_the_spec_is_in_the_schema() -> None:
    properties = resource()["properties"]["spec"]["properties"]
    assert [*properties] == [*PoolSpec.__struct_encode_fields__]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_shows_a_field_of_the_status(column: str) -> None:
    path = COLUMNS[column]
    if condition := re.fullmatch(r'\.status\.conditions\[\?\(@\.type=="\w+"\)\]\.(\w+)', path):
        path = f".status.conditions[].{condition[1]}"
    assert path.removeprefix(".") in dict(NODES)


def test_conditions_are_merged_by_their_type() -> None:
    conditions = dict(NODES)["status.conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert "type" in conditions["items"]["required"]


def test_a_condition_has_the_schema_of_metav1_condition() -> None:
    condition = dict(NODES)["status.conditions[]"]
    assert sorted(condition["required"]) == [
        *("lastTransitionTime", "message", "reason", "status", "type")
    ]
    bounds = {
        name: {key: value for key, value in field.items() if key not in ("type", "description")}
        for name, field in condition["properties"].items()
    }
    kind, reason = bounds["type"].pop("pattern"), bounds["reason"].pop("pattern")
    assert bounds == {
        "type": {"maxLength": 316},
        "status": {"enum": ["False", "True", "Unknown"]},
        "reason": {"minLength": 1, "maxLength": 1024},
        "message": {"maxLength": 32768},
        "lastTransitionTime": {"format": "date-time"},
        "observedGeneration": {"format": "int64", "minimum": 0},
    }
    for one in KINDS:
        assert re.fullmatch(kind, one.name)
        for kind_reason in one.reasons:
            assert re.fullmatch(reason, kind_reason.name), kind_reason.name


def test_routers_exactness_and_the_operator_are_shown_in_a_wide_table_only() -> None:
    [version] = crd()["spec"]["versions"]
    priorities = {
        one["name"]: one.get("priority", 0) for one in version["additionalPrinterColumns"]
    }
    assert priorities == dict.fromkeys([*COLUMNS, "Age"], 0) | dict.fromkeys(WIDE, 1)
    assert {"Routers", "Exact", "Seen"} == WIDE
