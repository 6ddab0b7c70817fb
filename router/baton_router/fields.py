"""Reads one JSON object field by field, so that each complaint names field, value and range.

A typed decoder would be shorter and answers "Expected `int` - at `$.max_tokens`", which tells a
client neither what it sent nor what it may send. Null counts as absent, as OpenAI has it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest, MalformedBody

SHOWN = 60  # characters of an offending value that are repeated to the client


def show(value: object) -> str:
    """The value as JSON, cut short."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, msgspec.MsgspecError):
        text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def wrong(name: str, value: object, allowed: str) -> InvalidRequest:
    """The error of a field that holds what it must not."""
    return InvalidRequest(f"{name} is {show(value)}; {allowed}", param=name)


class Fields:
    """A request body; every reader returns None (or the default) where the field is absent."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    @classmethod
    def parse(cls, data: bytes) -> Fields:
        """Raise MalformedBody unless `data` is a JSON object."""
        try:
            body = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedBody(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise MalformedBody(f"the body is {show(body)}; it must be a JSON object")
        return cls(body)

    def raw(self, name: str) -> Any:
        return self._body.get(name)

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

    def number(self, name: str) -> float | None:
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(name, value, "it must be a number")
        try:
            return float(value)
        except OverflowError:
            raise wrong(name, value, "it must be a number that fits 64 bits") from None

    def boolean(self, name: str, default: bool) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "it must be true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, value, "it must be a string")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(name, value, "it must be an object")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...] | None:
        """A string or a list of at most `most` strings."""
        value = self._body.get(name)
        if value is None:
            return None
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise wrong(name, value, "it must be a string or a list of strings")
        if len(items) > most:
            raise InvalidRequest(f"{name} holds {len(items)} strings; at most {most}", param=name)
        return tuple(items)

    def integers(self, name: str) -> tuple[int, ...] | None:
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise wrong(name, value, "it must be a list of integers")
        return tuple(value)


def _interval(low: int | None, high: int | None) -> str:
    if high is None:
        return f"{low} or more"
    if low is None:
        return f"{high} or less"
    return f"in [{low}, {high}]"
