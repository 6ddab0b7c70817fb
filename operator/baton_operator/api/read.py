"""From the object that the API gives to a `PoolSpec`, or one line that says what to write instead.

SpecError   the pool is not what can be built; one line: field, offending value, what to write
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from baton_operator.api.pool_spec import PoolSpec
from baton_operator.api.record import Record


class SpecError(Exception):
    """Final until the user edits the pool."""


def read_spec(spec: Any) -> PoolSpec:
    """Raise SpecError for what is not a spec."""
    try:
        return msgspec.convert(spec, PoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(_explain(str(error), spec, error.__cause__ is not None)) from error


_LOCATED = re.compile(r"(?P<what>.*?)(?: - at .*?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def _explain(message: str, spec: Any, ours: bool) -> str:
    """msgspec's words, or those of a __post_init__ (`ours`), as field, value, remedy."""
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
    # What is in the place of a URL may hold a password.
    value = "what is written" if "@" in repr(spec) else repr(spec)
    return f"{field}: {value} is wrong: {what[0].lower()}{what[1:]}{_choices(steps)}"


def _hint(steps: list[str]) -> Any:
    """The type at a path of keys in YAML's spelling."""
    hint: Any = PoolSpec
    for step in steps:
        if step.isdigit():
            continue  # a list's item: its type is in the list's
        [record] = _records(hint)
        hint = next(f.type for f in msgspec.structs.fields(record) if f.encode_name == step)
    return hint


def _records(hint: Any) -> list[type[Record]]:
    """Those in a type, however deep: X, X | None, tuple[X, ...], each with Metas or without."""
    if isinstance(hint, type) and issubclass(hint, Record):
        return [hint]
    return [record for part in typing.get_args(hint) for record in _records(part)]


def _choices(steps: list[str]) -> str:
    hint = _hint(steps)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    literal = typing.get_origin(hint) is Literal
    return f"; write {' or '.join(typing.get_args(hint))}" if literal else ""
