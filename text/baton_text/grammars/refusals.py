"""Why llguidance refuses a grammar, with the place in a schema that causes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from baton_text.grammars.errors import GrammarError, at, explain
from baton_text.grammars.grammar_text import grammars_in
from baton_text.grammars.limits import (
    LIMITS,
)
from baton_text.grammars.schema_parts import subschemas

MAX_LOCATED = 200  # parts of a schema that are compiled to find the one that is wrong


def validate(grammar: str) -> None:
    """Raise GrammarError if the grammar is invalid for every tokenizer."""
    message = _refusal(grammar)
    if message:
        raise locate_refusal(grammar, message)


def _refusal(grammar: str) -> str:
    """llguidance's message for a grammar that is invalid for every tokenizer; "" if it is valid."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return messages[0] if wrong else ""


def locate_refusal(grammar: str, message: str) -> GrammarError:
    """The error for llguidance's message, with the place in a schema that causes it."""
    for part in grammars_in(grammar):
        schema = part.get("json_schema")
        if isinstance(schema, dict) and _refusal_of(schema, schema) == message:
            place, cause = _cause(schema, message)
            return at(place, explain(cause))
    return GrammarError(explain(message))


def _refusal_of(schema: object, root: Mapping[str, Any]) -> str:
    """llguidance's message for a part of the schema `root`."""
    if not isinstance(schema, dict):
        return ""
    around = {key: root[key] for key in ("$schema", "$defs", "definitions") if key in root}
    return _refusal(json.dumps({"grammars": [{"json_schema": {**around, **schema}}]}))


def _cause(root: dict[str, Any], message: str) -> tuple[str, str]:
    """The path of the innermost part of a schema that causes the message, and its own message."""
    place, schema, tries = "", root, MAX_LOCATED
    while True:
        for path, inner in subschemas(schema):
            tries -= 1
            if tries < 0:
                return place, message
            refusal = _refusal_of(inner, root)
            # llguidance says of a required property only that no value matches it.
            if refusal and (refusal == message or f"required {_kind(path)} is unsat" in message):
                place, schema, message = f"{place}.{path}" if place else path, inner, refusal
                break
        else:
            return place, message


def _kind(path: str) -> str:
    """A part of an object or array, in llguidance's words."""
    name = path.removeprefix("properties.")
    return "item" if name == path else f"property '{name}'"
