"""A user's podTemplate laid over the one that was built. Pure, for anything that JSON can hold.

    objects               field by field
    lists of named items  item by item, by `name` (volumeMounts: by `mountPath`); new ones follow
    volumes, env          the same, but an item replaces its namesake whole: it is one choice out of
                          many sources, and two of them in one item are refused
    tolerations           the built ones stay, but for those whose `key` the user's name
    probes and hooks      naming another kind of handler drops the one that was built
    null                  removes what was built
    everything else       replaced

In: two trees. Out: a third that shares no part with either and holds no null, since server-side
apply would own one.
"""

from __future__ import annotations

from typing import Any

WHOLE_ITEMS = frozenset({"volumes", "env"})
HANDLERS = frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})


def merged(built: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = copied(built)
    if not HANDLERS.isdisjoint(override):
        result = {key: value for key, value in result.items() if key not in HANDLERS - {*override}}
    for key, value in override.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged_value(key, result.get(key), value)
    return result


def copied(value: Any) -> Any:
    """The same without nulls. What occurs twice in it is copied twice (unlike deepcopy)."""
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [copied(one) for one in value if one is not None]
    return value


def _merged_value(key: str, built: Any, override: Any) -> Any:
    if isinstance(built, dict) and isinstance(override, dict):
        return merged(built, override)
    if key == "tolerations" and _are_objects(built) and _are_objects(override):
        return _merged_tolerations(built, override)
    name = "mountPath" if key == "volumeMounts" else "name"
    if _is_keyed(built, name) and _is_keyed(override, name):
        return _merged_items(built, override, name, whole=key in WHOLE_ITEMS)
    return copied(override)


def _is_keyed(value: Any, name: str) -> bool:
    return _are_objects(value) and all(isinstance(item.get(name), str) for item in value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _merged_tolerations(
    built: list[dict[str, Any]], override: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Several may have one key, each for another effect, and one without a key is for all."""
    told = copied(override)
    keys = [item.get("key") for item in told]
    return [*(item for item in built if item.get("key") not in keys), *told]


def _merged_items(
    built: list[dict[str, Any]], override: list[dict[str, Any]], name: str, *, whole: bool
) -> list[dict[str, Any]]:
    result = {item[name]: item for item in built}
    for item in override:
        before = {} if whole else result.get(item[name], {})
        result[item[name]] = merged(before, item)
    return list(result.values())
