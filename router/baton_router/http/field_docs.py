"""Writes the table of request fields into docs/api.md, from the definitions that the parsers use.

    python -m baton_router.http.field_docs docs/api.md      writes the table into that page

In: the fields of `body_reader`, and the bounds in the schemas of `openapi`. Out: Markdown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton_router.http.openapi import BODIES
from baton_router.openai.body_reader import EMPTY, FIELDS, Body, Field
from baton_router.openai.body_schema import INT64

Json = Mapping[str, Any]
BEGIN, END = "<!-- request fields: begin -->", "<!-- request fields: end -->"
COMMAND = "python -m baton_router.http.field_docs docs/api.md"
SCHEMAS: Mapping[Body, str] = {
    "chat": "ChatRequest",
    "completions": "CompletionRequest",
    "drain": "DrainRequest",
}
_HEAD = (
    "| field | API | Baton | values, [default] | remark |",
    "|---|---|---|---|---|",
)
_DOES = {"obeyed": "obeys", "ignored": "ignores", "refused": "refuses"}


def table() -> str:
    """One row for each field, in the order of `body_reader`."""
    return "\n".join([*_HEAD, *map(_row, FIELDS)])


def with_table(page: str) -> str:
    """The page with a new table between its markers. Raise ValueError without markers."""
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:begin]}\n{table()}\n{page[end:]}"


def _row(field: Field) -> str:
    where = "both" if len(field.bodies) > 1 else field.bodies[0]
    cells = (f"`{field.name}`", where, _DOES[field.does], _values(field), field.remark)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(field: Field) -> str:
    """The allowed values and the default of a field."""
    schemas = [_schema(body, field.name) for body in field.bodies]
    allowed = _per_body(field, [_allowed(schema) for schema in schemas])
    if field.does == "refused":
        allowed = allowed or _choices(field.accepts or ())
        return f"all but {allowed}" if allowed else "all"
    defaults = [json.dumps(schema["default"]) for schema in schemas if "default" in schema]
    default = field.default or (_per_body(field, defaults) if defaults else "")
    return f"{allowed} [{default}]".strip() if default else allowed


def _per_body(field: Field, texts: Sequence[str]) -> str:
    """One text if it is the same for all bodies, else one per body."""
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{body}: {text}" for body, text in zip(field.bodies, texts, strict=True))


def _schema(body: Body, name: str) -> Json:
    """The field's schema; empty for fields inside a list, which the list's own reader checks."""
    schema: Json = BODIES[SCHEMAS[body]]
    for part in name.split("."):
        schema = schema.get("properties", {}).get(part, {})
    return schema


def _allowed(schema: Json) -> str:
    if "enum" in schema:
        return _choices(schema["enum"])
    if "anyOf" in schema:
        alternatives = (
            _allowed(alternative)
            for alternative in schema["anyOf"]
            if alternative != {"type": "null"}
        )
        return ", or ".join(dict.fromkeys(alternatives))
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_KINDS[kind](schema) for kind in kinds if kind != "null")


def _choices(values: Sequence[Any]) -> str:
    accepted = tuple(value for value in values if value is not None)
    if accepted == EMPTY:
        return "false, 0 or empty"
    shown = " or ".join(f"`{json.dumps(value)}`" for value in accepted)
    return shown.replace('`"', "`").replace('"`', "`")


def _number(schema: Json) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    low = None if low == INT64["minimum"] else low
    high = None if high == INT64["maximum"] else high
    if low is None:
        return "64 bits"
    return f"{_shown(low)} or more" if high is None else f"{_shown(low)} to {_shown(high)}"


def _shown(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _text(schema: Json) -> str:
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    return "a text" if high is None else f"a text of {low} to {high:,} characters"


def _list(schema: Json) -> str:
    low, high = schema.get("minItems"), schema.get("maxItems")
    items = _plural(schema.get("items", {}))
    if high is None:
        return f"a list of {items}"
    return f"{low} to {high:,} {items}" if low else f"at most {high:,} {items}"


def _plural(items: Json) -> str:
    match items:
        case {"type": "integer"}:
            return "ids"
        case {"type": "string", "maxLength": int(longest)}:
            return f"texts of up to {longest:,} characters"
        case {"type": "string"}:
            return "texts"
        case {"type": "array"}:
            return "lists of ids"
    return "objects"


def _object(schema: Json) -> str:
    high = schema.get("maxProperties")
    for values in schema.get("patternProperties", {}).values():
        return f"at most {high:,} ids, each with {_number(values)}"
    return "an object" if high is None else f"at most {high:,} texts by name"


_KINDS: Mapping[str, Callable[[Json], str]] = {
    "boolean": lambda schema: "true, false",
    "integer": _number,
    "number": _number,
    "string": _text,
    "array": _list,
    "object": _object,
}


def main(path: Path) -> None:
    path.write_text(with_table(path.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
