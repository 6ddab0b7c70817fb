"""Reads a spec, and explains what is wrong with it.

SpecError   the pool cannot be built; one line: field, offending value, what to write
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from baton_operator.api.record import Record
from baton_operator.api.spec import PoolSpec

_LOCATED = re.compile(r"(?P<what>.*?)(?: - at .*?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


class SpecError(Exception):
    """The spec is invalid. Retrying is useless until the user edits the pool."""


def read_spec(spec: Any) -> PoolSpec:
    """Raise SpecError if it is not a valid spec."""
    try:
        return msgspec.convert(spec, PoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(_explain(str(error), spec, error.__cause__ is not None)) from error


def _explain(message: str, spec: Any, ours: bool) -> str:
    """An error of msgspec, or of a __post_init__ (`ours`), as field, value and remedy."""
    located = _LOCATED.fullmatch(message)
    assert located is not None, message
    what, path = located["what"], located["path"] or ""
    field = f"spec{path}"
    if ours:
        return f"{field}.{what}"
    if key := _MISSING.fullmatch(what):
        return f"{field}.{key[1]}: missing"
    steps = re.findall(r"[^.\[\]]+", path)
    for step in steps:
        spec = spec[step] if isinstance(spec, Mapping) else spec[int(step)]
    # A value in the place of a URL may contain a password.
    value = "the value" if "@" in repr(spec) else repr(spec)
    return f"{field}: {value} is invalid: {what[0].lower()}{what[1:]}{_choices(steps)}"


def _hint(steps: list[str]) -> Any:
    """The type at a path of camelCase keys."""
    hint: Any = PoolSpec
    for step in steps:
        if step.isdigit():
            continue  # an item of a list: the list's type contains the item's
        [record] = _records(hint)
        hint = next(f.type for f in msgspec.structs.fields(record) if f.encode_name == step)
    return hint


def _records(hint: Any) -> list[type[Record]]:
    """All records in a type: X, X | None, tuple[X, ...], with or without Metas, at any depth."""
    if isinstance(hint, type) and issubclass(hint, Record):
        return [hint]
    return [record for part in typing.get_args(hint) for record in _records(part)]


def _choices(steps: list[str]) -> str:
    hint = _hint(steps)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    literal = typing.get_origin(hint) is Literal
    return f"; write {' or '.join(typing.get_args(hint))}" if literal else ""
