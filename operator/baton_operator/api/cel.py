"""Rules in CEL that the API server checks, as parts of a field's Meta or of a record.

A rule's message says what to write instead; the API server prefixes it with the field's path and
value.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Meta

# Key of a value's rules in its Meta.extra.
RULES = "rules"


def flag_meta(taken: tuple[str, ...]) -> Meta:
    """For a flag of a command that is not one of `taken`."""
    names = "|".join(taken)
    return ruled(
        CelRule(
            f"self.matches({quoted('^--[a-z][a-z0-9-]*(=|$)')})",
            "not a single flag; write --NAME=VALUE or --NAME",
        ),
        CelRule(
            f"!self.matches({quoted(f'^--(no-)?({names})(=|$)')})",
            "the operator sets this flag; leave it out and write the field of the spec instead",
        ),
        max_length=1024,
    )


class CelRule(msgspec.Struct, frozen=True):
    """`cel` sees the value as `self` and is true if the value is valid. `field` (".name") is the
    child field that the message is about, or "" for the value itself."""

    cel: str
    message: str
    field: str = ""


def ruled(*rules: CelRule, **more: Any) -> Meta:
    """A Meta that carries rules."""
    return Meta(extra={RULES: rules}, **more)


def given(path: str) -> str:
    """CEL: the string at `path` below `self` is present and not empty."""
    steps = path.split(".")
    parents = [f"has(self.{'.'.join(steps[:count])})" for count in range(1, len(steps) + 1)]
    return f"({' && '.join(parents)} && self.{path} != '')"


def both(first: str, second: str) -> CelRule:
    """A rule that allows at most one of two optional objects."""
    cel = f"!has(self.{first}) || !has(self.{second})"
    return CelRule(
        cel, f"must not be set together with {first}; write one of the two", field=f".{second}"
    )


def quoted(text: str) -> str:
    """A string, such as a pattern, as a CEL literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def matches(pattern: str, path: str = "") -> str:
    """CEL: the pattern matches the whole string, `self` or the field at `path` below it."""
    text = f"self.{path}" if path else "self"
    return f"{text}.matches({quoted(f'^(?:{pattern})$')})"


def text_meta(pattern: str, message: str, longest: int, optional: bool = False) -> Meta:
    """For a string of at most `longest` characters that the pattern matches."""
    cel = f"self == '' || {matches(pattern)}" if optional else matches(pattern)
    return ruled(CelRule(cel, message), max_length=longest)
