"""Reads one JSON object field by field, so that each complaint names field, value and range.

A typed decoder would be shorter and answers "Expected `int` - at `$.max_tokens`", which tells a
client neither what it sent nor what it may send. Null counts as absent, as OpenAI has it. What a
reader is told to allow is also what the served document says (`body_schema`), so each bound is
given here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest, MalformedBody
from baton_router.openai.large_json import decode
from baton_router.openai.request_fields import Members

Schema = Mapping[str, Any]
ANY: Schema = {}  # each value is as this has it
TRUE: Schema = {"const": True}
NOTHING_ELSE: Schema = {"additionalProperties": {"type": "null"}}
NOT_FALSE: Schema = {"enum": [True, None]}
SHOWN = 60  # characters of an offending value that are repeated to the client


def show(value: object) -> str:
    """The value as JSON, cut short."""
    try:
        text = msgspec.json.encode(_beginning(value)).decode()
    except (TypeError, msgspec.MsgspecError):
        text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _beginning(value: object, depth: int = SHOWN) -> object:
    """As much of the value as is shown of it: a client's may be long, and deep."""
    if isinstance(value, str):
        return value[: SHOWN + 1]
    if isinstance(value, list):
        return [_beginning(one, depth - 1) for one in value[: SHOWN + 1]] if depth else []
    if isinstance(value, dict):
        some = islice(value.items(), SHOWN + 1)
        return {_beginning(k): _beginning(v, depth - 1) for k, v in some} if depth else {}
    return value


def wrong(name: str, value: object, allowed: str) -> InvalidRequest:
    """The error of a field that holds what it must not."""
    return InvalidRequest(f"{name} is {show(value)}; {allowed}", param=name)


def members_schema(members: Members, **known: Schema) -> Schema:
    """Of an object that has these members and no other; `known` is what some of them are like."""
    told = {
        name: {"description": field.plain_remark} | dict(known.get(name, ANY))
        for name, field in members.fields.items()
    }
    return {"type": "object", "properties": told, **NOTHING_ELSE}


def needs(name: str, given: Schema, other: str, wanted: Schema, *, absent: bool = False) -> Schema:
    """The rule that `other` is as `wanted` where `name` is as `given`; it may be `absent`."""
    then = {"properties": {other: wanted}} | ({} if absent else {"required": [other]})
    return {"if": {"properties": {name: given}, "required": [name]}, "then": then}


class Fields:
    """A request body; every reader returns None (or the default) where the field is absent."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Fields:
        """Raise MalformedBody unless `data` is a JSON object."""
        try:
            body = decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedBody(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise MalformedBody(f"the body is {show(body)}; it must be a JSON object")
        return cls(body)

    def __bool__(self) -> bool:
        return bool(self._body)

    def only(self, members: Members) -> None:
        """Raise InvalidRequest for a field that is none of these, unless it is null."""
        members.check(self._body)

    def raw(self, name: str, schema: Schema, *, required: bool = False) -> Any:
        """The value as it came, for a caller who checks that it is as `schema` has it."""
        return self._body.get(name)

    def rule(self, schema: Schema) -> None:
        """What holds for several fields together, for a caller who checks that it does."""

    def given(self, names: Iterable[str]) -> bool:
        """Whether any of these is there: where none is, none need be read."""
        return any(self._body.get(name) is not None for name in names)

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        """An integer; 16.0 passes for 16, true does not pass for 1."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong(name, value, "it must be an integer")
        if not -(1 << 63) <= value < 1 << 63:
            raise wrong(name, value, "it must fit 64 bits")
        if (low is not None and value < low) or (high is not None and value > high):
            raise wrong(name, value, f"it must be {_interval(low, high)}")
        return value

    def number(
        self,
        name: str,
        low: float | None = None,
        high: float | None = None,
        above: float | None = None,
    ) -> float | None:
        """From `low`, or from `above` it, to `high`."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(name, value, "it must be a number")
        try:
            number = float(value)
        except OverflowError:
            raise wrong(name, value, "it must be a number that fits 64 bits") from None
        if not _inside(number, low, high, above):
            raise wrong(name, value, f"it must be {_interval(low, high, above)}")
        return number

    def boolean(self, name: str, default: bool) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "it must be true or false")
        return value

    def text(self, name: str, schema: Schema = ANY) -> str | None:
        """A string, for a caller who checks that it is as `schema` has it."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, value, "it must be a string")
        return value

    def mapping(self, name: str, schema: Schema = ANY) -> dict[str, Any] | None:
        """An object, for a caller who checks that its members are as `schema` has them."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(name, value, "it must be an object")
        return value

    def nested(self, name: str, members: Members) -> Fields | None:
        """An object whose members are fields, too: these, and no other."""
        value = self.mapping(name)
        if value is None:
            return None
        members.check(value, name)
        return Fields(value)

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...] | None:
        """A string or a list of at most `most` strings, each of 1 to `longest` characters."""
        value = self._body.get(name)
        if value is None:
            return None
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise wrong(name, value, "it must be a string or a list of strings")
        if len(items) > most:
            raise InvalidRequest(f"{name} holds {len(items)} strings; at most {most}", param=name)
        for item in items:
            if not 0 < len(item) <= longest:
                allowed = f"each must have 1 to {longest} characters"
                told = f"{name} holds {show(item)} of {len(item)} characters; {allowed}"
                raise InvalidRequest(told, param=name)
        return tuple(items)

    def objects(self, name: str, most: int) -> list[dict[str, Any]] | None:
        """A list of at most `most` objects with members of any kind."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise wrong(name, value, "it must be a list of objects")
        if len(value) > most:
            raise InvalidRequest(f"{name} holds {len(value)} objects; at most {most}", param=name)
        return value

    def ids(self, name: str, most: int, least: int = 0) -> tuple[int, ...] | None:
        """A list of `least` to `most` token ids; whether the vocabulary has them is not looked at
        here."""
        value = self._body.get(name)
        if value is None:
            return None
        value = integers(value) if isinstance(value, list) else None
        if value is None:
            raise wrong(name, self._body.get(name), "it must be a list of integers")
        if not least <= len(value) <= most:
            allowed = f"at most {most}" if not least else f"{least} to {most}"
            raise InvalidRequest(f"{name} holds {len(value)} ids; {allowed}", param=name)
        if any(item < 0 for item in value):
            raise wrong(name, value, "ids are 0 or more")
        return tuple(value)


def integers(values: list[Any]) -> list[int] | None:
    """The list with 16.0 as 16, None where it holds what is no integer."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        return values
    whole = kinds <= {int, float} and all(
        isinstance(one, int) or one.is_integer() for one in values
    )
    return list(map(int, values)) if whole else None


def _inside(value: float, low: float | None, high: float | None, above: float | None) -> bool:
    """False for what is no number, where there is any bound."""
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )


def _interval(low: float | None, high: float | None, above: float | None = None) -> str:
    if high is None:
        return f"{low:g} or more" if low is not None else f"above {above:g}"
    if above is not None:
        return f"in ({above:g}, {high:g}]"
    return f"in [{low:g}, {high:g}]" if low is not None else f"{high:g} or less"
