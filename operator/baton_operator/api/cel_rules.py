"""What the API server checks beyond types: rules in CEL, each with what to write instead.

In: records and kinds of values name their rules. Out: `crd` puts them into the schema. The API
server writes the field's path before the message, and the value behind the path.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Meta

# Where a Meta keeps the rules of its value.
RULES = "rules"


class CelRule(msgspec.Struct, frozen=True):
    """`cel` sees the value as `self` and is true where all is well. `field` (".name") is the one
    below it that the message speaks of; "" for the value itself."""

    cel: str
    message: str
    field: str = ""


def ruled(*rules: CelRule, **more: Any) -> Meta:
    """A value's Meta with rules."""
    return Meta(extra={RULES: rules}, **more)


def given(path: str) -> str:
    """CEL: there is a text at this path below `self`, and it is not empty."""
    steps = path.split(".")
    known = [f"has(self.{'.'.join(steps[:count])})" for count in range(1, len(steps) + 1)]
    return f"({' && '.join(known)} && self.{path} != '')"


def both(first: str, second: str) -> CelRule:
    """Two optional objects of which one at most is wanted."""
    cel = f"!has(self.{first}) || !has(self.{second})"
    return CelRule(cel, f"given beside {first}; write one of the two", field=f".{second}")


def quoted(text: str) -> str:
    """A text, such as a pattern, as CEL spells it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def matches(pattern: str, path: str = "") -> str:
    """CEL: the whole text matches, `self` or what is below it at that path."""
    text = f"self.{path}" if path else "self"
    return f"{text}.matches({quoted(f'^(?:{pattern})$')})"
