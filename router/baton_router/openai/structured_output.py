"""What an answer must match: the kinds of OpenAI's field, of vLLM's, and of vLLM's older ones.

In: the value of a field. Out: a RequestedGrammar, which becomes the text of a grammar once the
model is known (see `nodes.model_grammars`). This module checks only the form, as the API document
has it. Whether a schema, regex or grammar compiles depends on the model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.errors import MISSING, SHOWN, show, wrong
from baton_router.openai.fields.kinds import (
    Json,
    Schema,
    ValueKind,
    boolean,
    object_at,
    only,
    text,
)
from baton_router.openai.fields.table import (
    NOTHING_ELSE,
    FieldTable,
    check_names,
    ignored,
    optional,
    read_values,
    refused,
    required,
    schema_of,
)
from baton_router.openai.fields.unserved import BACKEND, WHITESPACE
from baton_text.grammars.constraints import Kind
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES

FORMAT, OUTPUTS = "response_format", "structured_outputs"
NAMES = (FORMAT, OUTPUTS, "guided_json", "guided_regex", "guided_choice", "guided_grammar")
ONE_AT_MOST = f"at most one of {', '.join(NAMES)} is there, and then no allowed_token_ids"
MAX_STRUCTURES = 1024
MAX_REASON = 500  # characters
# The fields that each type of `response_format` has beside its type.
TYPES: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers"),
}
KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """`value` is in the form that `grammar_of` expects for `kind`; JSON is text. `field` is its
    path in the client's body."""

    kind: Kind
    value: str | tuple[str, ...]
    field: str

    def refusal(self, error: GrammarError) -> InvalidRequest:
        """The error for a grammar that does not compile, with a reason of bounded length."""
        return InvalidRequest(
            f"{self.field}: {shorten_reason(str(error))}", param=self.field.partition(".")[0]
        )


def shorten_reason(reason: str) -> str:
    """The reason of an error, of bounded length."""
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


def _read_true(at: str, value: Any) -> str:
    if value is not True:
        raise wrong(at, value, "it must be true")
    return ""


def _read_text(at: str, value: Any, allowed: str = "it must be a string that is not empty") -> str:
    if not isinstance(value, str) or not value:
        raise wrong(at, value, allowed)
    return _check_bytes(at, value)


def _read_schema(at: str, value: Any) -> str:
    if isinstance(value, dict):
        return encode_bounded(at, value)
    return _read_text(at, value, "it must be a JSON schema: an object, or its text")


def _read_tag(at: str, value: Any) -> str:
    if isinstance(value, dict):
        _check_known(at, value, StructuralTag.FIELDS)
        read_values(StructuralTag, value, at)
        return encode_bounded(at, value)
    return _read_text(at, value, "it must be an object with structures and triggers, or its text")


def _read_choices(at: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise wrong(at, value, "it must be a list with at least one string")
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{at} has {len(value)} strings; at most {MAX_CHOICES}", param=at)
    if not all(value):
        raise wrong(at, value, "none of its strings may be empty")
    _check_bytes(at, "".join(value))
    return tuple(value)


def _check_known(at: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    for name, value in given.items():
        if name not in names and value is not None:
            param = f"{at}.{name[:SHOWN]}"
            raise InvalidRequest(
                f"{param} is {show(value)}, and {at} does not have this field here; its fields are"
                f" {', '.join(names)}",
                param=param,
                code="unknown_parameter",
            )


def encode_bounded(at: str, value: Mapping[str, Any]) -> str:
    try:
        return _check_bytes(at, msgspec.json.encode(value).decode())
    except RecursionError:
        raise InvalidRequest(f"{at} is nested too deep", param=at) from None


def _check_bytes(at: str, text: str) -> str:
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{at} has {size} bytes; at most {MAX_GRAMMAR_BYTES}", param=at)
    return text


def _list_of(type_: type, what: str, items: Schema) -> ValueKind[list[Any]]:
    """A list of at least one object or string."""

    def read(at: str, value: Any) -> list[Any]:
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(item, type_) for item in value)
        ):
            raise wrong(at, value, f"it must be a list of {what} with at least one element")
        if len(value) > MAX_STRUCTURES:
            raise InvalidRequest(
                f"{at} has {len(value)} {what}; at most {MAX_STRUCTURES}", param=at
            )
        if type_ is str and not all(value):
            raise wrong(at, value, "none of its strings may be empty")
        return value

    bounds = {"minItems": 1, "maxItems": MAX_STRUCTURES}
    return ValueKind(read, {"type": "array", "items": items} | bounds)


STRUCTURES = _list_of(dict, "objects", {"type": "object"})
TRIGGERS = _list_of(str, "strings", {"type": "string", "minLength": 1})


class StructuralTag(FieldTable):
    """The parts of a structural tag."""

    structures = required(STRUCTURES, "each with `begin`, `schema`, `end`")
    triggers = required(TRIGGERS, "each begins a structure")


def _grammar_kind(
    kind: Kind, read: Callable[[str, Any], str | tuple[str, ...]], schema: Schema
) -> ValueKind[RequestedGrammar]:
    return ValueKind(lambda at, value: RequestedGrammar(kind, read(at, value), at), schema)


GRAMMAR_KINDS: Mapping[Kind, ValueKind[RequestedGrammar]] = {
    "json": _grammar_kind("json", _read_schema, {"anyOf": [{"type": "object"}, _STRING]}),
    "json_object": _grammar_kind("json_object", _read_true, {"enum": [True]}),
    "regex": _grammar_kind("regex", _read_text, _STRING),
    "choice": _grammar_kind(
        "choice",
        _read_choices,
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_CHOICES,
        },
    ),
    "grammar": _grammar_kind("grammar", _read_text, _STRING),
    "structural_tag": _grammar_kind(
        "structural_tag", _read_tag, {"anyOf": [schema_of(StructuralTag), _STRING]}
    ),
}


class StructuredOutputs(FieldTable):
    """The members of `structured_outputs`."""

    json = optional(GRAMMAR_KINDS["json"], "a JSON schema: an object, or its text")
    json_object = optional(GRAMMAR_KINDS["json_object"], "any JSON object")
    regex = optional(GRAMMAR_KINDS["regex"], "what the whole answer matches")
    choice = optional(GRAMMAR_KINDS["choice"], "a list of texts, one of which is the answer")
    grammar = optional(GRAMMAR_KINDS["grammar"], "a grammar in Lark or EBNF")
    structural_tag = optional(
        GRAMMAR_KINDS["structural_tag"], "`structures` and `triggers`, or their text"
    )
    disable_fallback = ignored(boolean(), BACKEND)
    disable_any_whitespace = refused(WHITESPACE, accepts=(False,))
    whitespace_pattern = refused(WHITESPACE, accepts=(False,))
    disable_additional_properties = refused("write it in the schema", accepts=(False,))


def _encode_object(at: str, value: Any) -> str:
    return encode_bounded(at, object_at(at, value))


class JsonSchema(FieldTable):
    """The members of `response_format.json_schema`."""

    schema = required(ValueKind(_encode_object, {"type": "object"}), "the JSON schema")
    name = ignored(text(), "a text for the client's own use")
    description = ignored(text(), "a text for the client's own use")
    strict = ignored(boolean(), "each schema is enforced")


def _read_json_schema(at: str, value: Any) -> RequestedGrammar:
    given = object_at(at, value)
    _check_known(at, given, JsonSchema.FIELDS)
    return RequestedGrammar("json", read_values(JsonSchema, given, at).schema, f"{at}.schema")


class ResponseFormat(FieldTable):
    """The members of `response_format`, for all of its types."""

    type = required(
        only(list(TYPES), f"use one of {', '.join(TYPES)}"),
        "what the answer must match: anything, an object, a schema, or tagged structures",
    )
    json_schema = optional(
        ValueKind(_read_json_schema, schema_of(JsonSchema), JsonSchema), "of type `json_schema`"
    )
    structures = optional(STRUCTURES, "of type `structural_tag`: `begin`, `schema`, `end`")
    triggers = optional(TRIGGERS, "of type `structural_tag`: each begins a structure")


def _read_format(at: str, value: Any) -> RequestedGrammar | None:
    given = object_at(at, value)
    kind = ResponseFormat.type.kind.read(f"{at}.type", given.get("type", MISSING))
    _check_known(at, given, ("type", *TYPES[kind]))
    match kind:
        case "json_schema":
            return _read_json_schema(f"{at}.{kind}", given.get(kind, MISSING))
        case "structural_tag":
            parts = {name: given.get(name, MISSING) for name in TYPES[kind]}
            read_values(StructuralTag, parts, at)
            return RequestedGrammar("structural_tag", encode_bounded(at, parts), at)
        case "json_object":
            return RequestedGrammar("json_object", "", at)
    return None


def _read_outputs(at: str, value: Any) -> RequestedGrammar:
    given = object_at(at, value)
    _check_known(at, given, StructuredOutputs.FIELDS)
    check_names(StructuredOutputs, given, at)
    kinds = [kind for kind in KINDS if given.get(kind) is not None]
    if len(kinds) != 1:
        has = " and ".join(kinds) or "none of them"
        raise InvalidRequest(
            f"{at} has {has}; it must have exactly one of {', '.join(KINDS)}", param=at
        )
    grammar: RequestedGrammar = getattr(read_values(StructuredOutputs, given, at), kinds[0])
    return grammar


def _variant(
    table: type[FieldTable], needed: Sequence[str], others: Sequence[str] = (), **changed: Schema
) -> Json:
    """The schema of an object with some of a table's fields: those it needs, and others."""
    rows = table.FIELDS
    properties = {name: rows[name].schema for name in (*needed, *others)}
    for name in needed:
        kind = changed.get(name, rows[name].kind.schema)
        properties[name] = {"description": properties[name]["description"], **kind}
    return {"type": "object", "properties": properties, "required": list(needed), **NOTHING_ELSE}


_FORMATS: Schema = {
    "anyOf": [
        _variant(ResponseFormat, ("type", *parts), type={"enum": [name]})
        for name, parts in TYPES.items()
    ]
}
_NO_KINDS = [name for name in StructuredOutputs.FIELDS if name not in KINDS]
_OUTPUTS: Schema = {"anyOf": [_variant(StructuredOutputs, [kind], _NO_KINDS) for kind in KINDS]}
FORMAT_KIND = ValueKind(_read_format, _FORMATS, ResponseFormat)
OUTPUTS_KIND = ValueKind(_read_outputs, _OUTPUTS, StructuredOutputs)
