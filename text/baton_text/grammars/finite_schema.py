"""Parts of a schema that no finite value matches, because they require themselves.

In: a schema in enforceable form. Out: the same with false in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton_text.grammars.errors import GrammarError
from baton_text.grammars.schema_parts import LISTS, NAMED, SINGLE, Schema, find_local, parts, types


def drop_endless(root: Any) -> Schema:
    """The schema with false in place of each part that no finite value matches. Raise GrammarError
    if that is the whole schema."""
    if isinstance(root, bool):
        return root
    finite: dict[int, bool] = {}  # schemas that a finite value may match
    schemas = [part for part in parts(root) if isinstance(part, dict)]
    changed = True
    while changed:
        changed = False
        for schema in reversed(schemas):
            if not finite.get(id(schema)) and _ends(schema, root, finite):
                finite[id(schema)] = changed = True
    if not finite.get(id(root)):
        raise GrammarError("no finite value matches it, because each would contain itself")
    kept: Schema = _pruned(root, finite) if len(finite) < len(schemas) else root
    return kept


def _ends(schema: Mapping[str, Any], root: Any, finite: Mapping[int, bool]) -> bool:
    """Whether a finite value may match the schema, as far as `finite` says."""

    def ends(part: Any) -> bool:
        return finite.get(id(part), False) if isinstance(part, dict) else True

    if "$ref" in schema:
        target = find_local(root, schema["$ref"])
        if target is not None and not ends(target):
            return False
    if not all(map(ends, _list_of(schema, "allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        options = [each for each in _list_of(schema, key) if each is not False]
        if options and not any(map(ends, options)):
            return False
    if "enum" in schema or "const" in schema:
        return True
    kinds = types(schema)
    if kinds - {"object", "array"}:
        return True
    return ("object" in kinds and all(map(ends, _needed(schema)))) or (
        "array" in kinds and all(map(ends, _needed_items(schema)))
    )


def _list_of(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key, [])
    return value if isinstance(value, list) else []


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of the properties that every object has."""
    properties = schema.get("properties", {})
    for name in _list_of(schema, "required"):
        if isinstance(name, str) and name in properties:
            yield properties[name]


def _needed_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that every array has."""
    least = schema.get("minItems", 0)
    items = schema.get("items", True)
    first = items if isinstance(items, list) else schema.get("prefixItems", [])
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    if not isinstance(least, int) or not isinstance(first, list):
        return []
    return [*first[:least], *([rest] if least > len(first) else [])]


def _pruned(schema: Any, finite: Mapping[int, bool]) -> Any:
    """A copy with false in place of schemas that are not `finite`."""
    if isinstance(schema, list):
        return [_pruned(part, finite) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            kept[key] = {name: _kept(part, finite) for name, part in value.items()}
        elif key in LISTS and isinstance(value, list):
            kept[key] = [_kept(part, finite) for part in value]
        elif key in SINGLE:
            kept[key] = _kept(value, finite)
        else:
            kept[key] = value
    return kept


def _kept(schema: Any, finite: Mapping[int, bool]) -> Any:
    if isinstance(schema, list):
        return [_kept(part, finite) for part in schema]
    if isinstance(schema, dict) and not finite.get(id(schema)):
        return False
    return _pruned(schema, finite)
