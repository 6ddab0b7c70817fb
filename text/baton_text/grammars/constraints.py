"""Turn a client's constraint (see `Kind`) into grammar text, the form on the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from baton_text.grammars.client_schema import parse_json, schema_of
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.grammar_text import check_size, grammars_in
from baton_text.grammars.lark import Lark
from baton_text.grammars.lark_syntax import check_matches, number_of_rules, with_schemas
from baton_text.grammars.limits import (
    JSON_OPTIONS,
    MAX_CHOICES,
    MAX_EBNF_BYTES,
    MAX_RULES,
)
from baton_text.grammars.schema_parts import show_value
from baton_text.tokenizer import Tokenizer

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]


def grammar_of(kind: Kind, value: Any, tokenizer: Tokenizer | None = None) -> str:
    """Return the text of a grammar. The meaning of `value` depends on `kind`:

    json            a JSON schema: an object, a boolean, or the text of either
    json_object     ignored; the answer is any JSON object
    regex           a regular expression that the whole answer matches
    choice          a list of strings; the answer is one of them
    grammar         a grammar in Lark, or in EBNF (GBNF) if it contains "::="
    structural_tag  {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: free text in
                    which each trigger starts one of the structures

    Without the model's tokenizer, a structural tag's markers match only as text, never as an added
    token of the model.

    Raise GrammarError for a value of another form. `Grammars.check` tests whether the grammar
    compiles.
    """
    match kind:
        case "json":
            return _json(schema_of(value))
        case "json_object":
            return _json({"type": "object"})
        case "regex":
            return str(LLMatcher.grammar_from_regex(_text(value, "a regular expression")))
        case "choice":
            return _choice(value)
        case "grammar":
            return _lark(_text(value, "a grammar"))
        case "structural_tag":
            return _structural_tag(value, Lark(tokenizer))


def _json(schema: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))


def _enforceable_parts(grammar: str) -> str:
    """A client's grammar in Lark, or its list of grammars, with its schemas in enforceable form.
    Raise GrammarError for a grammar that llguidance cannot compile safely."""
    parts = grammars_in(grammar)
    rules = len(parts) + sum(
        number_of_rules(part["lark_grammar"])
        for part in parts
        if isinstance(part.get("lark_grammar"), str)
    )
    if rules > MAX_RULES:
        raise GrammarError(f"the grammar has {rules} rules; the limit is {MAX_RULES}")
    enforced: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part.get("lark_grammar"), str):
            check_matches(part["lark_grammar"])
            part = part | {"lark_grammar": with_schemas(part["lark_grammar"], _json_part)}
        if "json_schema" in part:
            part = part | {"json_schema": _json_part(part["json_schema"])}
        enforced.append(part)
    return json.dumps({"grammars": enforced}, ensure_ascii=False)


def _json_part(schema: object) -> dict[str, Any]:
    """A schema with the options for all JSON."""
    return {**schema_of(schema), "x-guidance": JSON_OPTIONS}


def _choice(value: object) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise GrammarError(
            f"a choice must be a list of at least one string, not {show_value(value)}"
        )
    if len(value) > MAX_CHOICES:
        raise GrammarError(f"the choice has {len(value)} strings; at most {MAX_CHOICES}")
    for choice in value:
        if not isinstance(choice, str) or not choice:
            raise GrammarError(f"a choice must contain only non-empty strings, not {choice!r}")
    check_size("".join(value))
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
    return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))


def _lark(text: str) -> str:
    if "::=" in text:
        size = len(text.encode())
        if size > MAX_EBNF_BYTES:
            raise GrammarError(f"{size} bytes of EBNF; the limit is {MAX_EBNF_BYTES}, or use Lark")
        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises exceptions of any type
            raise GrammarError(f"the EBNF grammar cannot be read: {error}") from None
    return _enforceable_parts(text)


def _structural_tag(value: object, lark: Lark) -> str:
    value = parse_json(value, "the structural tag")
    if not isinstance(value, dict):
        raise GrammarError(f"a structural tag must be an object, not {show_value(value)}")
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("structural_tag.structures must be a list of at least one structure")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("structural_tag.triggers must be a list of non-empty strings")
    tags: dict[str, list[str]] = {}
    for structure in structures:
        trigger, follows = _tag(structure, triggers, lark)
        tags.setdefault(trigger, []).append(follows)
    rules = lark.tagged([(trigger, f"({' | '.join(tags[trigger])})") for trigger in tags])
    return str(LLMatcher.grammar_from_lark("\n".join(["start: tagged", *rules])))


def _tag(structure: object, triggers: Sequence[str], lark: Lark) -> tuple[str, str]:
    """The structure's trigger, and the Lark expression that follows the trigger."""
    if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
        raise GrammarError(f"a structure needs a string `begin`; {show_value(structure)} has none")
    begin, end = structure["begin"], structure.get("end", "")
    if not isinstance(end, str):
        raise GrammarError(f"a structure's `end` must be a string, not {show_value(end)}")
    trigger = next((candidate for candidate in triggers if begin.startswith(candidate)), None)
    if trigger is None:
        raise GrammarError(f"the structure {begin!r} starts with none of the triggers {triggers}")
    token = lark.leading_token(begin)
    if token:
        trigger = token  # even if the trigger is a prefix of the token
    elif lark.has_token(trigger):
        raise GrammarError(
            f"the trigger {trigger!r} has a token of the model after text; start with the token"
        )
    schema = json.dumps(_json_part(structure.get("schema", {})), ensure_ascii=False)
    return trigger, f"{lark.text(begin[len(trigger) :])} %json {schema} {lark.text(end)}"


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"{what} must be a non-empty string, not {show_value(value)}")
    check_size(value)
    return value
