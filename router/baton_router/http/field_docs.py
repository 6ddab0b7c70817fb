"""Writes the tables of request fields into the pages, from the tables that the router reads by.

    python -m baton_router.http.field_docs PAGE...      writes the tables of these pages

In: sections, each with the tables of some bodies, and pages with the sections' markers. Out:
Markdown, with a row for each field; a field that a section's bodies share has one row. First come
the fields of one body, then the shared ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_router.http.drain import DrainFields
from baton_router.http.node_sleep import SleepFields, WakeFields
from baton_router.http.prefixes import PrefixFields
from baton_router.openai.fields.chat import ChatFields
from baton_router.openai.fields.completions import CompletionFields
from baton_router.openai.fields.kinds import INT64
from baton_router.openai.fields.table import EMPTY, Field, FieldTable
from baton_router.openai.fields.tokens import DetokenizeFields, TokenizeFields
from baton_router.pooling.fields import EmbeddingFields, RerankFields, ScoreFields

Json = Mapping[str, Any]
MARKERS = "<!-- {section} fields: begin -->", "<!-- {section} fields: end -->"
COMMAND = "python -m baton_router.http.field_docs docs/*.md"
REQUEST = "request"
# The sections of the pages: what the column API says -> the body's table. A section of one body has
# no such column.
SECTIONS: Mapping[str, Mapping[str, type[FieldTable]]] = {
    REQUEST: {
        "chat": ChatFields,
        "completions": CompletionFields,
        "tokenize": TokenizeFields,
        "detokenize": DetokenizeFields,
        "drain": DrainFields,
        "prefixes": PrefixFields,
        "sleep": SleepFields,
        "wake": WakeFields,
    },
    "pooling": {
        "embeddings": EmbeddingFields,
        "score": ScoreFields,
        "rerank": RerankFields,
    },
}
GENERATION = ("chat", "completions")
SHARED = "both"
_USES = {"obeyed": "obeys", "ignored": "ignores", "refused": "refuses"}


@dataclass(frozen=True, slots=True)
class DocumentedField:
    """A field with its path, and its definition in each table that has it with this remark."""

    path: str
    definitions: Mapping[str, Field[Any]]

    @property
    def where(self) -> str:
        return SHARED if self.definitions.keys() == {*GENERATION} else ", ".join(self.definitions)


def documented_fields(section: str = REQUEST) -> list[DocumentedField]:
    """All fields of a section, in the order of the page."""
    tables = SECTIONS[section]
    definitions: dict[tuple[str, str], dict[str, Field[Any]]] = {}
    for name, table in tables.items():
        for path, field in _paths(table):
            definitions.setdefault((path, field.remark), {})[name] = field
    fields = [DocumentedField(path, bodies) for (path, _), bodies in definitions.items()]
    order = [*GENERATION, SHARED, *(name for name in tables if name not in GENERATION)]
    return sorted(fields, key=lambda field: order.index(field.where.partition(",")[0]))


def field_table(section: str = REQUEST) -> str:
    """The section's table in Markdown."""
    rows = [
        ["field", "API", "Baton", "values, [default]", "remark"],
        ["---"] * 5,
        *map(_row, documented_fields(section)),
    ]
    if len(SECTIONS[section]) == 1:
        rows = [[*row[:1], *row[2:]] for row in rows]
    head, line, *others = rows
    return "\n".join([_line(head), f"|{'|'.join(line)}|", *map(_line, others)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def sections_of(page: str) -> list[str]:
    """The sections whose markers a page has."""
    return [section for section in SECTIONS if MARKERS[0].format(section=section) in page]


def with_tables(page: str) -> str:
    """The page with new tables between its markers. Raise ValueError for a begin without end."""
    for section in sections_of(page):
        first, last = (marker.format(section=section) for marker in MARKERS)
        begin = page.index(first) + len(first)
        page = f"{page[:begin]}\n{field_table(section)}\n{page[page.index(last) :]}"
    return page


def _paths(table: type[FieldTable], within: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """The fields of a table and of the objects in it, with their paths."""
    for name, field in table.FIELDS.items():
        yield within + name, field
        if field.kind.members is not None:
            yield from _paths(field.kind.members, f"{within}{name}{'[]' * field.kind.listed}.")


def _row(documented: DocumentedField) -> list[str]:
    field = next(iter(documented.definitions.values()))
    remark = f"{field.remark}; required" if field.needed else field.remark
    values = _values(documented)
    cells = (f"`{documented.path}`", documented.where, _USES[field.use], values, remark)
    return [cell.replace("|", "\\|") for cell in cells]


def _values(documented: DocumentedField) -> str:
    """The allowed values and the default of a field."""
    fields = documented.definitions
    allowed = _for_each({name: _allowed(field.kind.schema) for name, field in fields.items()})
    if next(iter(fields.values())).use == "refused":
        return f"all but {allowed}" if allowed else "all"
    default = _for_each({name: _default(field) for name, field in fields.items()})
    return f"{allowed} [{default}]".strip() if default else allowed


def _default(field: Field[Any]) -> str:
    if field.default or "default" not in field.kind.schema:
        return field.default
    return json.dumps(field.kind.schema["default"])


def _for_each(texts: Mapping[str, str]) -> str:
    """One text if it is the same for all bodies, else one per body."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _allowed(schema: Json) -> str:
    if "enum" in schema:
        return _choices(schema["enum"])
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(map(_allowed, schema["anyOf"])))
    return _KINDS[schema["type"]](schema) if "type" in schema else ""


def _choices(values: Sequence[Any]) -> str:
    if tuple(values) == EMPTY:
        return "false, 0 or empty"
    shown = " or ".join(f"`{json.dumps(value)}`" for value in values)
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
        case {"anyOf": forms}:
            return " or ".join(dict.fromkeys(map(_plural, forms)))
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


def main(pages: Sequence[Path]) -> None:
    for path in pages:
        page = path.read_text()
        if sections_of(page):
            path.write_text(with_tables(page))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
