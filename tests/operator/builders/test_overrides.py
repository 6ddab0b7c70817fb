"""Merging a podTemplate: what is merged, what is replaced, what stays."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator.builders.child import copied, merged

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fields beside fields": ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    "objects go deep": ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
    "a value of another kind replaces": ({"a": {"b": 1}}, {"a": "text"}, {"a": "text"}),
    "named items meet by name, new ones follow": (
        {"containers": [{"name": "node", "image": "x"}]},
        {"containers": [{"name": "side"}, {"name": "node", "tty": True}]},
        {"containers": [{"name": "node", "image": "x", "tty": True}, {"name": "side"}]},
    ),
    "items without names are replaced": (
        {"hostAliases": [{"ip": "a"}, {"ip": "b"}]},
        {"hostAliases": [{"ip": "c"}]},
        {"hostAliases": [{"ip": "c"}]},
    ),
    "tolerations of other keys follow": (
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
    "a toleration of the same key replaces": (
        {"tolerations": [{"key": "a", "tolerationSeconds": 30}, {"key": "b"}]},
        {"tolerations": [{"key": "a", "operator": "Exists"}]},
        {"tolerations": [{"key": "b"}, {"key": "a", "operator": "Exists"}]},
    ),
    "a toleration without a key follows": (
        {"tolerations": [{"key": "a"}]},
        {"tolerations": [{"operator": "Exists"}]},
        {"tolerations": [{"key": "a"}, {"operator": "Exists"}]},
    ),
    "no item replaces those without names": ({"args": ["a"]}, {"args": []}, {"args": []}),
    "no item adds none to named ones": (
        {"ports": [{"name": "http"}]},
        {"ports": []},
        {"ports": [{"name": "http"}]},
    ),
    "mounts meet by their path": (
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
    "a volume has one source": (
        {"volumes": [{"name": "tmp", "emptyDir": {}}]},
        {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
        {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
    ),
    "a variable has one source": (
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}, {"name": "B", "value": "1"}]},
        {"env": [{"name": "A", "value": "x"}]},
        {"env": [{"name": "A", "value": "x"}, {"name": "B", "value": "1"}]},
    ),
    "a probe has one handler, and keeps its times": (
        {"livenessProbe": {"httpGet": {"path": "/"}, "periodSeconds": 5}},
        {"livenessProbe": {"exec": {"command": ["true"]}}},
        {"livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 5}},
    ),
    "the same handler is changed": (
        {"livenessProbe": {"httpGet": {"path": "/", "port": "http"}}},
        {"livenessProbe": {"httpGet": {"path": "/alive"}}},
        {"livenessProbe": {"httpGet": {"path": "/alive", "port": "http"}}},
    ),
    "null removes": ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
    "null removes nothing that is not there": ({"a": 1}, {"b": None}, {"a": 1}),
    "no null gets in": ({}, {"a": {"b": None}, "c": [None, 1]}, {"a": {}, "c": [1]}),
}


@pytest.mark.parametrize(("built", "override", "result"), CASES.values(), ids=CASES)
def test_an_override_is_merged_as_documented(
    built: dict[str, Any], override: dict[str, Any], result: dict[str, Any]
) -> None:
    assert merged(built, override) == result


WORDS = ["name", "key", "mountPath", "env", "tolerations", "volumes", "volumeMounts", "exec"]
KEYS = st.sampled_from([*WORDS, "a", "b"])
LEAVES = st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["x", "y", "http"])


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Anything that JSON can hold, with the words that have a meaning in many wrong places."""

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        named = st.fixed_dictionaries({"name": st.sampled_from("xyz")}, optional={"a": inner})
        items = st.lists(named, max_size=3, unique_by=lambda item: item["name"])
        return st.lists(inner, max_size=3) | items | st.dictionaries(KEYS, inner, max_size=4)

    return st.dictionaries(KEYS, st.recursive(leaves, deeper, max_leaves=12), max_size=4)


def parts(value: Any) -> set[int]:
    """Identities of everything in it that could be edited."""
    if isinstance(value, dict):
        return {id(value)}.union(*map(parts, value.values()))
    return {id(value)}.union(*map(parts, value)) if isinstance(value, list) else set()


def nulls(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(nulls, value.values() if isinstance(value, dict) else value))
    return value is None


@given(trees(LEAVES), trees(LEAVES))
def test_the_result_shares_nothing_holds_no_null_and_leaves_both_as_they_were(
    built: dict[str, Any], override: dict[str, Any]
) -> None:
    before = deepcopy((built, override))
    result = merged(built, override)
    assert (built, override) == before
    assert parts(result).isdisjoint(parts(built) | parts(override))
    assert nulls(result) == 0


@given(trees(LEAVES))
def test_an_empty_override_changes_nothing(built: dict[str, Any]) -> None:
    assert merged(built, {}) == copied(built)


@given(trees(LEAVES), trees(LEAVES))
def test_the_same_override_twice_is_the_same_as_once(
    built: dict[str, Any], override: dict[str, Any]
) -> None:
    once = merged(built, override)
    assert merged(once, override) == once


@given(trees(LEAVES))
def test_what_occurs_twice_is_copied_twice(tree: dict[str, Any]) -> None:
    result = merged({"a": tree, "b": tree}, {})
    assert parts(result["a"]).isdisjoint(parts(result["b"]))
