"""The kinds of values that most fields have, with their bounds.

Each function returns a ValueKind: how a value is read, and its JSON schema. An error names the
field, the value and the values allowed. A kind of one field alone stands beside that field's table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from baton_protocol.errors import InvalidRequest, exact
from baton_router.openai.fields.errors import show, wrong

Json = dict[str, Any]
Schema = Mapping[str, Any]
V_co = TypeVar("V_co", covariant=True)

INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[V_co]):
    """What a value may be. `read` gets the value's path in the body and the value; it returns what
    the value means, or raises InvalidRequest. `schema` says the same as a JSON schema, leaving null
    aside. `members` is the FieldTable of the value; if `listed`, of its items."""

    read: Callable[[str, Any], V_co]
    schema: Schema
    members: type | None = None
    listed: bool = False


def _unchanged(at: str, value: Any) -> Any:
    return value


ANYTHING: ValueKind[Any] = ValueKind(_unchanged, {})  # who uses the value checks it


def only(values: Sequence[Any], complaint: str) -> ValueKind[Any]:
    """One of these values."""

    def read(at: str, value: Any) -> Any:
        for allowed in values:  # as in JSON, true is not 1
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return value
        raise wrong(at, value, complaint)

    return ValueKind(read, {"enum": list(values)})


def boolean(default: bool | None = None) -> ValueKind[bool]:
    """True or false. `default` is for the document."""

    def read(at: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise wrong(at, value, "it must be true or false")
        return value

    return ValueKind(read, {"type": "boolean"} | ({} if default is None else {"default": default}))


def integer(low: int | None = None, high: int | None = None) -> ValueKind[int]:
    """An integer of 64 bits; 16.0 passes as 16, true does not pass as 1."""

    def read(at: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong(at, value, "it must be an integer")
        if not -(1 << 63) <= value < 1 << 63:
            raise wrong(at, value, "it must fit 64 bits")
        if (low is not None and value < low) or (high is not None and value > high):
            raise wrong(at, value, f"it must be {_interval(low, high)}")
        return value

    return ValueKind(read, {"type": "integer"} | INT64 | _bounds(low, high))


def number(low: float | None = None, high: float | None = None) -> ValueKind[float]:
    """A number of at least `low` and at most `high`."""

    def read(at: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(at, value, "it must be a number")
        try:
            result = float(value)
        except OverflowError:
            raise wrong(at, value, "it must be a number that fits 64 bits") from None
        # The comparisons fail for NaN, too.
        if not ((low is None or result >= low) and (high is None or result <= high)):
            raise wrong(at, value, f"it must be {_interval(low, high)}")
        return result

    return ValueKind(read, {"type": "number"} | _bounds(low, high))


def text(most: int | None = None, pattern: str = "", allowed: str = "") -> ValueKind[str]:
    """A string of at most `most` characters. With `pattern`, all of it must match; `allowed` is the
    error otherwise."""
    whole = re.compile(pattern)

    def read(at: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong(at, value, "it must be a string")
        if most is not None and len(value) > most:
            raise InvalidRequest(f"{at} has {len(value)} characters; at most {most}", param=at)
        if pattern and whole.fullmatch(value) is None:
            raise wrong(at, value, allowed)
        return value

    schema: Json = {"type": "string"}
    schema |= {"pattern": f"^{pattern}$"} if pattern else {}
    return ValueKind(read, schema if most is None else schema | {"maxLength": most})


def texts(most: int, longest: int) -> ValueKind[tuple[str, ...]]:
    """A string or a list of at most `most` strings, each of 1 to `longest` characters."""

    def read(at: str, value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise wrong(at, value, "it must be a string or a list of strings")
        if len(items) > most:
            raise InvalidRequest(f"{at} holds {len(items)} strings; at most {most}", param=at)
        for item in items:
            if not 0 < len(item) <= longest:
                allowed = f"each must have 1 to {longest} characters"
                message = f"{at} holds {show(item)} of {len(item)} characters; {allowed}"
                raise InvalidRequest(message, param=at)
        return tuple(items)

    item = {"type": "string", "minLength": 1, "maxLength": longest}
    return ValueKind(read, {"anyOf": [item, {"type": "array", "items": item, "maxItems": most}]})


def choice(*values: str) -> ValueKind[str]:
    """One of these strings."""

    def read(at: str, value: Any) -> str:
        if value not in values:
            raise wrong(at, value, f"use one of {', '.join(values)}")
        return cast("str", value)

    return ValueKind(read, {"enum": list(values)})


def mapping(**more: Any) -> ValueKind[Json]:
    """An object with members of any kind. `more` adds to its schema."""
    return ValueKind(object_at, {"type": "object"} | more)


def objects(most: int) -> ValueKind[list[Json]]:
    """A list of at most `most` objects with members of any kind."""

    def read(at: str, value: Any) -> list[Json]:
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise wrong(at, value, "it must be a list of objects")
        if len(value) > most:
            raise InvalidRequest(f"{at} holds {len(value)} objects; at most {most}", param=at)
        return value

    return ValueKind(read, {"type": "array", "items": {"type": "object"}, "maxItems": most})


def ids(most: int, least: int = 0) -> ValueKind[tuple[int, ...]]:
    """A list of `least` to `most` token ids; not checked against the vocabulary."""

    def read(at: str, value: Any) -> tuple[int, ...]:
        items = integers(value) if isinstance(value, list) else None
        if items is None:
            raise wrong(at, value, "it must be a list of integers")
        if not least <= len(items) <= most:
            allowed = f"at most {most}" if not least else f"{least} to {most}"
            raise InvalidRequest(f"{at} holds {len(items)} ids; {allowed}", param=at)
        if any(item < 0 for item in items):
            raise wrong(at, items, "ids are 0 or more")
        return tuple(items)

    items: Schema = {"type": "integer", "minimum": 0}
    return ValueKind(read, {"type": "array", "items": items, "minItems": least, "maxItems": most})


def prompts(most: int) -> ValueKind[list[str | tuple[int, ...]]]:
    """A text, token ids, or a list of at most `most` of either; not checked against the
    vocabulary."""
    allowed = "it must be a string, a list of strings, token ids or a list of token id lists"

    def read(at: str, value: Any) -> list[str | tuple[int, ...]]:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise wrong(at, value, allowed)
        ids = integers(value)
        if ids is not None:
            return [tuple(ids)]
        if len(value) > most:
            raise InvalidRequest(f"{at} holds {len(value)} prompts; at most {most}", param=at)
        if all(isinstance(item, str) for item in value):
            return list(value)
        lists = [integers(item) if isinstance(item, list) else None for item in value]
        if None in lists:
            raise wrong(at, value, allowed)
        return [tuple(ids) for ids in lists if ids is not None]

    one: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    several: Json = {"type": "array", "minItems": 1, "maxItems": most}
    forms = [
        {"type": "string"},
        one,
        several | {"items": {"type": "string"}},
        several | {"items": one},
    ]
    return ValueKind(read, {"anyOf": forms})


def integers(values: list[Any]) -> list[int] | None:
    """The list with 16.0 as 16; None if it holds anything but integers."""
    types = set(map(type, values))
    if types <= {int}:
        return values
    whole = types <= {int, float} and all(
        isinstance(value, int) or value.is_integer() for value in values
    )
    return list(map(int, values)) if whole else None


def object_at(at: str, value: Any) -> Json:
    """The value if it is an object. Raise InvalidRequest."""
    if not isinstance(value, dict):
        raise wrong(at, value, "it must be an object")
    return value


def nullable(schema: Schema) -> Json:
    """The schema that also allows null."""
    if "enum" in schema:
        return {**schema, "enum": [None, *schema["enum"]]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return dict(schema)


def _bounds(low: float | None, high: float | None) -> Json:
    bounds = {"minimum": low, "maximum": high}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _interval(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"in [{exact(low)}, {exact(high)}]"
    if low is not None:
        return f"{exact(low)} or more"
    assert high is not None, "a value is out of bounds only if there is a bound"
    return f"{exact(high)} or less"
