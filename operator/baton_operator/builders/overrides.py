"""Merges a user's podTemplate over the built one. Pure."""

from __future__ import annotations

from typing import Any

WHOLE_ITEMS = frozenset({"volumes", "env"})
HANDLERS = frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})


def merge_template(built: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Merge a user's podTemplate over the built one. Pure, for any JSON value.

        objects               field by field
        lists of named items  item by item, by `name` (volumeMounts: by `mountPath`); new ones
                              follow
        volumes, env          the same, but an item replaces its namesake completely, because the
                              API server rejects an item with two sources
        tolerations           the built ones stay, except those whose `key` the user names
        probes and hooks      another kind of handler replaces the built one
        null                  removes what was built
        everything else       replaced

    In: two trees. Out: a third that shares no part with either and contains no null, because
    server-side apply would own the null.
    """
    result: dict[str, Any] = copy_without_nulls(built)
    if not HANDLERS.isdisjoint(override):
        result = {key: value for key, value in result.items() if key not in HANDLERS - {*override}}
    for key, value in override.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge_value(key, result.get(key), value)
    return result


def copy_without_nulls(value: Any) -> Any:
    """A deep copy without nulls. Unlike in deepcopy, a part that occurs twice is copied twice."""
    if isinstance(value, dict):
        return {key: copy_without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [copy_without_nulls(item) for item in value if item is not None]
    return value


def _merge_value(key: str, built: Any, override: Any) -> Any:
    if isinstance(built, dict) and isinstance(override, dict):
        return merge_template(built, override)
    if key == "tolerations" and _are_objects(built) and _are_objects(override):
        return _merge_tolerations(built, override)
    name = "mountPath" if key == "volumeMounts" else "name"
    if _is_keyed(built, name) and _is_keyed(override, name):
        return _merge_items(built, override, name, whole=key in WHOLE_ITEMS)
    return copy_without_nulls(override)


def _is_keyed(value: Any, name: str) -> bool:
    return _are_objects(value) and all(isinstance(item.get(name), str) for item in value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _merge_tolerations(
    built: list[dict[str, Any]], override: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Several tolerations may share a key, each with another effect; one without a key matches
    all."""
    overrides = copy_without_nulls(override)
    keys = [item.get("key") for item in overrides]
    return [*(item for item in built if item.get("key") not in keys), *overrides]


def _merge_items(
    built: list[dict[str, Any]], override: list[dict[str, Any]], name: str, *, whole: bool
) -> list[dict[str, Any]]:
    result = {item[name]: item for item in built}
    for item in override:
        before = {} if whole else result.get(item[name], {})
        result[item[name]] = merge_template(before, item)
    return list(result.values())
