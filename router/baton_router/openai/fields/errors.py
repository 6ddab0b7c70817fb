"""The error for a field with a wrong value: it names the field, the value and what is allowed."""

from __future__ import annotations

from itertools import islice

import msgspec

from baton_protocol.errors import InvalidRequest

SHOWN = 60  # characters of a client's value or name that an error repeats


class _Missing:
    """Stands for the value of a member that an object does not have."""


MISSING = _Missing()


def wrong(name: str, value: object, allowed: str) -> InvalidRequest:
    """The error for a field with a value that is not allowed. The value of a member of an object
    is `given.get(name, MISSING)`, so that the error tells null from missing."""
    return InvalidRequest(f"{name} is {show(value)}; {allowed}", param=name)


def show(value: object) -> str:
    """The value as JSON, truncated; the word "missing" for MISSING."""
    if value is MISSING:
        return "missing"
    try:
        text = msgspec.json.encode(_beginning(value)).decode()
    except (TypeError, msgspec.MsgspecError):
        text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _beginning(value: object, depth: int = SHOWN) -> object:
    """The part of the value that is shown, as a client's value may be long and deep."""
    if isinstance(value, str):
        return value[: SHOWN + 1]
    if isinstance(value, list):
        return [_beginning(item, depth - 1) for item in value[: SHOWN + 1]] if depth else []
    if isinstance(value, dict):
        items = islice(value.items(), SHOWN + 1)
        return {_beginning(k): _beginning(v, depth - 1) for k, v in items} if depth else {}
    return value
