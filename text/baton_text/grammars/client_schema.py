"""Take a client's JSON schema: parse it, bound its size and depth, keep what can be enforced."""

from __future__ import annotations

import json
from typing import Any

from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammar_text import check_size
from baton_text.grammars.json_schema import enforceable
from baton_text.grammars.limits import (
    MAX_JSON_DEPTH,
    MAX_REFERENCED_LEVELS,
)
from baton_text.grammars.schema_parts import parts, referred, show_value


def schema_of(value: object) -> dict[str, Any]:
    """The JSON schema in `value`, which is a schema or its text, in the form that `json_schema`
    describes.

    Raise GrammarError if it is not a schema, too large, too deep, or false."""
    value = parse_json(value, "the schema")
    if value is True:
        return {}
    if value is False:
        raise GrammarError("the schema is false, which no answer matches")
    if not isinstance(value, dict):
        raise GrammarError(f"a schema must be an object, not {show_value(value)}")
    _check_parts(value)
    try:
        check_size(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError as error:  # includes UnicodeEncodeError for a lone surrogate
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    enforced = enforceable(value)
    if enforced is False:
        raise GrammarError("no value matches the schema")
    return {} if enforced is True else enforced


def parse_json(value: object, what: str) -> object:
    """Parse `value` if it is JSON text, else return it as it is."""
    if not isinstance(value, str):
        return value
    check_size(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is not valid JSON: {error}") from None


def _check_parts(value: object) -> None:
    """Raise GrammarError for too deep nesting and for parts that llguidance misreads.

    Not recursive, so that deep nesting cannot exhaust the stack."""
    # Up to draft 7, an $id beside a $ref is ignored; llguidance applies it in every draft.
    older = isinstance(value, dict) and "json-schema.org/draft-0" in str(value.get("$schema"))
    level, depth = [value], 0
    while level:
        if depth > MAX_JSON_DEPTH:
            raise GrammarError(f"the schema nests deeper than {MAX_JSON_DEPTH} levels")
        inner: list[object] = []
        for part in level:
            if isinstance(part, dict):
                if older and isinstance(part.get("$ref"), str) and "$id" in part:
                    raise GrammarError("the schema has an $id beside a $ref; leave out the $id")
                inner += part.values()
            elif isinstance(part, list):
                inner += part
            elif isinstance(part, int) and not -(2**63) <= part < 2**64:
                raise GrammarError(f"the schema has {part}, a number of more than 64 bits")
        level, depth = inner, depth + 1
    levels = _referenced_levels(value)
    if levels > MAX_REFERENCED_LEVELS:
        raise GrammarError(
            f"the schema refers to parts with {levels} nesting levels together; the limit is"
            f" {MAX_REFERENCED_LEVELS}"
        )


def _referenced_levels(schema: object) -> int:
    """The nesting levels of all parts to which a schema refers, together: an upper bound of how
    deep references lead."""
    order = list(parts(schema))
    levels: dict[int, int] = {}
    for part in reversed(order):
        inner = part.values() if isinstance(part, dict) else part
        levels[id(part)] = 1 + max(
            (levels.get(id(inner_part), 0) for inner_part in inner), default=0
        )
    references = {
        part["$ref"]
        for part in order
        if isinstance(part, dict) and isinstance(part.get("$ref"), str)
    }
    return sum(levels.get(id(referred(schema, reference)), 1) for reference in references)
