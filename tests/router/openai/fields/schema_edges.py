"""Values on both sides of each bound of a JSON schema.

In: a schema from the router's OpenAPI document. Out: pairs of a value and whether the schema allows
it. The values are as close to each bound as possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
Edge = tuple[Any, bool]
_WRONG_TYPE = {"integer": "1", "number": "1", "boolean": 1, "string": 1, "array": 1, "object": 1}


def edges(schema: Json) -> Iterator[Edge]:
    for branch in schema.get("anyOf", ()):
        yield from edges(branch)
    if "enum" in schema:
        yield from ((value, True) for value in schema["enum"])
        yield "something else", False
    types = schema.get("type", [])
    for type_ in [types] if isinstance(types, str) else types:
        if type_ == "null":
            yield None, True
            continue
        if "anyOf" not in schema and len(types) == 2:
            yield _WRONG_TYPE[type_], False
        yield from _EDGES_OF_TYPE.get(type_, _nothing)(schema)


def example(schema: Json) -> Any:
    """A value that the schema allows."""
    return next(value for value, allowed in edges(schema) if allowed and value is not None)


def _integers(schema: Json) -> Iterator[Edge]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None:
        yield from ((low, True), (low - 1, False))
    if high is not None:
        yield from ((high, True), (high + 1, False))
    yield low or 1, True


def _numbers(schema: Json) -> Iterator[Edge]:
    for name, away in (("minimum", -math.inf), ("maximum", math.inf)):
        if (bound := schema.get(name)) is not None:
            yield from ((bound, True), (math.nextafter(bound, away), False))
    if (bound := schema.get("exclusiveMinimum")) is not None:
        yield from ((math.nextafter(bound, math.inf), True), (bound, False))


def _texts(schema: Json) -> Iterator[Edge]:
    longest = schema.get("maxLength", 1)
    yield from (("x" * longest, True), ("", not schema.get("minLength")))
    if "maxLength" in schema:
        yield "x" * (longest + 1), False


def _lists(schema: Json) -> Iterator[Edge]:
    items, min_items = schema["items"], schema.get("minItems", 0)
    item = example(items)
    yield [item] * max(min_items, 1), True
    yield from (([value], allowed) for value, allowed in edges(items))
    if min_items:
        yield [item] * (min_items - 1), False
    if schema.get("uniqueItems"):
        yield [item, item], False
    elif "maxItems" in schema:
        max_items = schema["maxItems"]
        yield from (([item] * max_items, True), ([item] * (max_items + 1), False))


def _objects(schema: Json) -> Iterator[Edge]:
    if not schema.keys() - {"type", "description"}:
        yield {"a name": 1}, True
    for inner in schema.get("patternProperties", {}).values():
        yield from (({"7": value}, allowed) for value, allowed in edges(inner))
        yield {"a name": example(inner)}, False
    properties = schema.get("properties", {})
    required = {name: example(properties[name]) for name in schema.get("required", ())}
    for name, inner in properties.items():
        if "const" not in inner:
            yield from ((required | {name: value}, allowed) for value, allowed in edges(inner))
    if "maxProperties" in schema:
        values = [*schema.get("patternProperties", {}).values(), {"type": "string"}]
        limit, value = schema["maxProperties"], example(values[0])
        for count in (limit, limit + 1):
            yield {str(number): value for number in range(count)}, count == limit


def _nothing(schema: Json) -> Iterator[Edge]:
    yield True, True


_EDGES_OF_TYPE = {
    "integer": _integers,
    "number": _numbers,
    "string": _texts,
    "array": _lists,
    "object": _objects,
}
