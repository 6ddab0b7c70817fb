"""Merging a podTemplate into a built one: what is merged, replaced and kept."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator.builders.overrides import copy_without_nulls, merge_template

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "new fields are added": ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    "objects are merged recursively": (
        {"a": {"b": 1, "c": 2}},
        {"a": {"c": 3}},
        {"a": {"b": 1, "c": 3}},
    ),
    "a value of another type replaces the old one": ({"a": {"b": 1}}, {"a": "text"}, {"a": "text"}),
    "items are merged by name and new ones are appended": (
        {"containers": [{"name": "node", "image": "x"}]},
        {"containers": [{"name": "side"}, {"name": "node", "tty": True}]},
        {"containers": [{"name": "node", "image": "x", "tty": True}, {"name": "side"}]},
    ),
    "lists of items without names are replaced": (
        {"hostAliases": [{"ip": "a"}, {"ip": "b"}]},
        {"hostAliases": [{"ip": "c"}]},
        {"hostAliases": [{"ip": "c"}]},
    ),
    "tolerations with other keys are appended": (
        {"tolerations": [{"key": "a"}, {"key": "b"}]},
        {"tolerations": [{"key": "c", "effect": "x"}, {"key": "c", "effect": "y"}]},
        {
            "tolerations": [
                {"key": "a"},
                {"key": "b"},
                {"key": "c", "effect": "x"},
                {"key": "c", "effect": "y"},
            ]
        },
    ),
    "a toleration with the same key is replaced": (
        {"tolerations": [{"key": "a", "tolerationSeconds": 30}, {"key": "b"}]},
        {"tolerations": [{"key": "a", "operator": "Exists"}]},
        {"tolerations": [{"key": "b"}, {"key": "a", "operator": "Exists"}]},
    ),
    "a toleration without a key is appended": (
        {"tolerations": [{"key": "a"}]},
        {"tolerations": [{"operator": "Exists"}]},
        {"tolerations": [{"key": "a"}, {"operator": "Exists"}]},
    ),
    "an empty list replaces items without names": ({"args": ["a"]}, {"args": []}, {"args": []}),
    "an empty list keeps items with names": (
        {"ports": [{"name": "http"}]},
        {"ports": []},
        {"ports": [{"name": "http"}]},
    ),
    "volume mounts are merged by path": (
        {"volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]},
        {
            "volumeMounts": [
                {"name": "big", "mountPath": "/tmp"},
                {"name": "big", "mountPath": "/x"},
            ]
        },
        {
            "volumeMounts": [
                {"name": "big", "mountPath": "/tmp"},
                {"name": "big", "mountPath": "/x"},
            ]
        },
    ),
    "a new volume source replaces the old one": (
        {"volumes": [{"name": "tmp", "emptyDir": {}}]},
        {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
        {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
    ),
    "a new source of a variable replaces the old one": (
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}, {"name": "B", "value": "1"}]},
        {"env": [{"name": "A", "value": "x"}]},
        {"env": [{"name": "A", "value": "x"}, {"name": "B", "value": "1"}]},
    ),
    "a new probe handler replaces the old one and keeps its times": (
        {"livenessProbe": {"httpGet": {"path": "/"}, "periodSeconds": 5}},
        {"livenessProbe": {"exec": {"command": ["true"]}}},
        {"livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 5}},
    ),
    "the same probe handler is merged": (
        {"livenessProbe": {"httpGet": {"path": "/", "port": "http"}}},
        {"livenessProbe": {"httpGet": {"path": "/alive"}}},
        {"livenessProbe": {"httpGet": {"path": "/alive", "port": "http"}}},
    ),
    "null removes a field": ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
    "null for a missing field has no effect": ({"a": 1}, {"b": None}, {"a": 1}),
    "nulls in new values are dropped": (
        {},
        {"a": {"b": None}, "c": [None, 1]},
        {"a": {}, "c": [1]},
    ),
}


@pytest.mark.parametrize(("built", "override", "result"), CASES.values(), ids=CASES)
def test_an_override_is_merged_as_documented(
    built: dict[str, Any], override: dict[str, Any], result: dict[str, Any]
) -> None:
    assert merge_template(built, override) == result


SPECIAL_KEYS = ["name", "key", "mountPath", "env", "tolerations", "volumes", "volumeMounts", "exec"]
KEYS = st.sampled_from([*SPECIAL_KEYS, "a", "b"])
LEAVES = st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["x", "y", "http"])


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Generate JSON objects with the special keys also where they have no meaning."""

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        named = st.fixed_dictionaries({"name": st.sampled_from("xyz")}, optional={"a": inner})
        items = st.lists(named, max_size=3, unique_by=lambda item: item["name"])
        return st.lists(inner, max_size=3) | items | st.dictionaries(KEYS, inner, max_size=4)

    return st.dictionaries(KEYS, st.recursive(leaves, deeper, max_leaves=12), max_size=4)


def parts(value: Any) -> set[int]:
    """Return the ids of all mutable objects in the value."""
    if isinstance(value, dict):
        return {id(value)}.union(*map(parts, value.values()))
    return {id(value)}.union(*map(parts, value)) if isinstance(value, list) else set()


def nulls(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(nulls, value.values() if isinstance(value, dict) else value))
    return value is None


@given(trees(LEAVES), trees(LEAVES))
def test_a_merge_shares_nothing_has_no_null_and_does_not_change_its_inputs(
    built: dict[str, Any], override: dict[str, Any]
) -> None:
    before = deepcopy((built, override))
    result = merge_template(built, override)
    assert (built, override) == before
    assert parts(result).isdisjoint(parts(built) | parts(override))
    assert nulls(result) == 0


@given(trees(LEAVES))
def test_an_empty_override_changes_nothing(built: dict[str, Any]) -> None:
    assert merge_template(built, {}) == copy_without_nulls(built)


@given(trees(LEAVES), trees(LEAVES))
def test_merging_the_same_override_twice_equals_once(
    built: dict[str, Any], override: dict[str, Any]
) -> None:
    once = merge_template(built, override)
    assert merge_template(once, override) == once


@given(trees(LEAVES))
def test_an_object_that_occurs_twice_is_copied_twice(tree: dict[str, Any]) -> None:
    result = merge_template({"a": tree, "b": tree}, {})
    assert parts(result["a"]).isdisjoint(parts(result["b"]))
