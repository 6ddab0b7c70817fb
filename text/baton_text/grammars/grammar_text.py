"""The text of a grammar, as it travels with a request: its parts and its size."""

from __future__ import annotations

import json
from typing import Any

from baton_text.grammars.errors import GrammarError
from baton_text.grammars.limits import (
    MAX_GRAMMAR_BYTES,
)


def grammars_in(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar's text, each a JSON schema or Lark. The first part is the start and
    refers to the others by name. Raise GrammarError for unreadable text."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    try:
        parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
        return [{key: part[key] for key in part if part[key] is not None} for part in parts]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise GrammarError(f"the grammar cannot be read: {error}") from None


def check_size(text: str) -> None:
    """Raise GrammarError if `text` exceeds MAX_GRAMMAR_BYTES."""
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")
