"""The JSON schema of a body, derived from the code that reads it, so that the two cannot differ.

In: a function that reads Fields, and sample bodies that together reach all of its readers. Out: the
schema of all valid bodies, with the bounds that the readers use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from baton_router.openai.body_reader import ANY, NOTHING_ELSE, Fields, Members, Schema

Json = dict[str, Any]
INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}


def body_schema(read: Callable[[Fields], object], *bodies: Json) -> Json:
    """The schema of a body that `read` accepts. Where a bound depends on another field, the schema
    has the widest bound among `bodies`."""
    schema: Json = {"type": "object", "properties": {}}
    required: set[str] = set()
    rules: list[Json] = []
    for body in bodies:
        read(_RecordedFields(body, schema, required, rules))
    schema |= {"required": sorted(required)} if required else {}
    return schema | ({"allOf": rules} if rules else {})


class _RecordedFields(Fields):
    """Fields that record each read field and its bounds in `recorded`, a schema, and `rules`."""

    def __init__(self, body: Json, recorded: Json, required: set[str], rules: list[Json]) -> None:
        super().__init__(body)
        self._recorded = recorded
        self._properties: dict[str, Json] = recorded["properties"]
        self._required = required
        self._rules = rules
        self._remarks: dict[str, str] = {}

    def only(self, members: Members) -> None:
        self._recorded |= dict(NOTHING_ELSE)
        self._remarks = {name: field.plain_remark for name, field in members.fields.items()}

    def raw(self, name: str, schema: Schema, *, required: bool = False) -> Any:
        self._note(name, schema)
        if required:
            self._required.add(name)
        return super().raw(name, schema, required=required)

    def rule(self, schema: Schema) -> None:
        if schema not in self._rules:
            self._rules.append(dict(schema))

    def given(self, names: Iterable[str]) -> bool:
        return True

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        self._note(name, _nullable("integer") | INT64 | _bounds(low, high))
        return super().integer(name, low, high)

    def number(
        self, name: str, low: float | None = None, high: float | None = None
    ) -> float | None:
        self._note(name, _nullable("number") | _bounds(low, high))
        return super().number(name, low, high)

    def boolean(self, name: str, default: bool) -> bool:
        self._note(name, _nullable("boolean") | {"default": default})
        return super().boolean(name, default)

    def text(self, name: str, schema: Schema = ANY) -> str | None:
        self._note(name, _nullable("string") | dict(schema))
        return super().text(name, schema)

    def mapping(self, name: str, schema: Schema = ANY) -> Json | None:
        self._note(name, _nullable("object") | dict(schema))
        return super().mapping(name, schema)

    def nested(self, name: str, members: Members) -> Fields | None:
        schema = _nullable("object") | {"properties": {}} | dict(NOTHING_ELSE)
        self._note(name, schema)
        value = super().mapping(name)
        if value is None:
            return None
        inner = _RecordedFields(value, schema, set(), [])
        inner.only(members)
        return inner

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...] | None:
        one = {"type": "string", "minLength": 1, "maxLength": longest}
        several = {"type": "array", "items": one, "maxItems": most}
        self._note(name, {"anyOf": [one, several, {"type": "null"}]})
        return super().texts(name, most, longest)

    def objects(self, name: str, most: int) -> list[Json] | None:
        self._note(name, _nullable("array") | {"items": {"type": "object"}, "maxItems": most})
        return super().objects(name, most)

    def ids(self, name: str, most: int, least: int = 0) -> tuple[int, ...] | None:
        items = {"type": "integer", "minimum": 0}
        sizes = {"minItems": least, "maxItems": most}
        self._note(name, _nullable("array") | {"items": items} | sizes)
        return super().ids(name, most, least)

    def _note(self, name: str, schema: Schema) -> None:
        known = self._properties.get(name)
        merged = dict(schema) if known is None else _wider(known, schema)
        remark = self._remarks.get(name)
        self._properties[name] = merged if remark is None else merged | {"description": remark}


def _nullable(kind: str) -> Json:
    return {"type": [kind, "null"]}


def _bounds(low: float | None, high: float | None) -> Json:
    given = {"minimum": low, "maximum": high}
    return {name: value for name, value in given.items() if value is not None}


def _wider(known: Mapping[str, Any], schema: Schema) -> Json:
    """Merge two schemas of a field. One is empty, or only minimum or nested properties differ."""
    if not known or not schema:
        return dict(known or schema)
    merged = dict(known) | dict(schema)
    if "minimum" in known and "minimum" in schema:
        merged["minimum"] = min(known["minimum"], schema["minimum"])
    if known.get("properties"):
        merged["properties"] = known["properties"] | schema.get("properties", {})
    return merged
