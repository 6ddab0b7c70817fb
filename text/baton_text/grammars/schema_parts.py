"""The parts of a JSON schema: all that it contains, and what its references lead to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any] | bool
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties")
EVERY_TYPE = ("array", "boolean", "integer", "null", "number", "object", "string")


def parts(schema: Any) -> Iterator[Any]:
    """The objects and lists in a schema, each before those within it."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict | list):
            yield part
            pending += part.values() if isinstance(part, dict) else part


def referred(schema: object, reference: str) -> object:
    """The part to which a $ref points; the whole schema if it is not a path within it."""
    target = find_local(schema, reference)
    return schema if target is None else target


def find_local(schema: object, reference: Any) -> object | None:
    """The part to which a $ref points; None if it is not a path within the schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = schema
    path = reference.removeprefix("#")
    if path and not path.startswith("/"):
        return None
    for key in path.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            return None
    return target


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly in a schema, each with its path."""
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            yield from ((_join_path(key, name), part) for name, part in value.items())
        elif key in (*LISTS, "items") and isinstance(value, list):
            yield from ((f"{key}[{index}]", part) for index, part in enumerate(value))
        elif key in SINGLE:
            yield key, value


def _join_path(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def show_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that `type` allows; all of them without it."""
    kind = schema.get("type", EVERY_TYPE)
    return frozenset((kind,) if isinstance(kind, str) else kind)
