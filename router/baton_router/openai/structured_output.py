"""Reads what an answer must match: OpenAI's field, vLLM's, or vLLM's older ones.

In: a body's fields. Out: a RequestedGrammar, which becomes the text of a grammar once the model is
known (see `nodes.model_grammars`). This module checks only the form, as the API document has it.
Whether a schema, regex or grammar compiles depends on the model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_router.openai.body_reader import (
    MEMBERS,
    MISSING,
    NOTHING_ELSE,
    SHOWN,
    Fields,
    Members,
    Schema,
    show,
    wrong,
)
from baton_text.grammars.constraints import Kind
from baton_text.grammars.errors import GrammarError
from baton_text.grammars.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES

FORMAT, OUTPUTS = "response_format", "structured_outputs"
OLDER: Mapping[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
NAMES = (FORMAT, OUTPUTS, *OLDER)
ONE_AT_MOST = f"at most one of {', '.join(NAMES)} is there, and then no allowed_token_ids"
MAX_STRUCTURES = 1024
MAX_REASON = 500  # characters
_JSON_SCHEMA = "json_schema"
# The fields that each type of `response_format` has beside its type.
TYPES: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    _JSON_SCHEMA: (_JSON_SCHEMA,),
    "structural_tag": ("structures", "triggers"),
}
KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


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
            f"{self.field}: {shortened(str(error))}", param=self.field.partition(".")[0]
        )


def shortened(reason: str) -> str:
    """The reason of an error, of bounded length."""
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


def requested_grammar(fields: Fields) -> RequestedGrammar | None:
    """The grammar the client asks for. Raise InvalidRequest for the first wrong field, or for two
    that exclude each other."""
    if not fields.given(NAMES):
        return None
    fields.rule({"description": ONE_AT_MOST})
    found = [
        one
        for one in (
            _response_format(fields.raw(FORMAT, _FORMAT_SCHEMA)),
            _structured_outputs(fields.raw(OUTPUTS, _OUTPUTS_SCHEMA)),
            *(
                _of_kind(kind, fields.raw(name, _nullable(_VALUES[kind])), name)
                for name, kind in OLDER.items()
            ),
        )
        if one is not None
    ]
    if len(found) > 1:
        first, second = (one.field.partition(".")[0] for one in found[:2])
        raise InvalidRequest(
            f"{second} and {first} both constrain the answer; send only one of them",
            param=second,
        )
    if not found:
        return None
    if fields.given(("allowed_token_ids",)):
        name = found[0].field.partition(".")[0]
        raise InvalidRequest(
            f"allowed_token_ids and {name} both restrict the tokens; send only one of them",
            param="allowed_token_ids",
        )
    return found[0]


def _response_format(value: Any) -> RequestedGrammar | None:
    if value is None:
        return None
    given = object_at(FORMAT, value)
    kind = given.get("type", MISSING)
    if not isinstance(kind, str) or kind not in TYPES:
        raise wrong(f"{FORMAT}.type", kind, f"use one of {', '.join(TYPES)}")
    _only(FORMAT, given, ("type", *TYPES[kind]))
    match kind:
        case "json_schema":
            return _json_schema(f"{FORMAT}.{_JSON_SCHEMA}", given.get(_JSON_SCHEMA, MISSING))
        case "structural_tag":
            _check_tag(FORMAT, given)
            parts = {name: given[name] for name in TYPES[kind]}
            return RequestedGrammar("structural_tag", encoded(FORMAT, parts), FORMAT)
        case "json_object":
            return RequestedGrammar("json_object", "", FORMAT)
    return None


def _json_schema(at: str, value: Any) -> RequestedGrammar:
    given = object_at(at, value)
    _only(at, given, MEMBERS["chat", at].fields)
    for name in ("name", "description"):
        if not isinstance(given.get(name), str | None):
            raise wrong(f"{at}.{name}", given[name], "it must be a string")
    if not isinstance(given.get("strict"), bool | None):
        raise wrong(f"{at}.strict", given["strict"], "it must be true or false")
    schema = object_at(f"{at}.schema", given.get("schema", MISSING))
    return RequestedGrammar("json", encoded(f"{at}.schema", schema), f"{at}.schema")


def _structured_outputs(value: Any) -> RequestedGrammar | None:
    if value is None:
        return None
    given = object_at(OUTPUTS, value)
    members = MEMBERS["chat", OUTPUTS]
    _only(OUTPUTS, given, members.fields)
    for name, one in members.fields.items():
        if one.does == "refused" and given.get(name) is not None and given[name] is not False:
            raise wrong(one.name, given[name], one.complaint)
    if not isinstance(given.get("disable_fallback"), bool | None):
        allowed = "it must be true or false"
        raise wrong(f"{OUTPUTS}.disable_fallback", given["disable_fallback"], allowed)
    kinds = [kind for kind in KINDS if given.get(kind) is not None]
    if len(kinds) != 1:
        has = " and ".join(kinds) or "none of them"
        raise InvalidRequest(
            f"{OUTPUTS} has {has}; it must have exactly one of {', '.join(KINDS)}", param=OUTPUTS
        )
    return _of_kind(kinds[0], given[kinds[0]], f"{OUTPUTS}.{kinds[0]}")


def _of_kind(kind: Kind, value: Any, at: str) -> RequestedGrammar | None:
    return None if value is None else RequestedGrammar(kind, _READERS[kind](at, value), at)


def _true(at: str, value: Any) -> str:
    if value is not True:
        raise wrong(at, value, "it must be true")
    return ""


def _text(at: str, value: Any, allowed: str = "it must be a string that is not empty") -> str:
    if not isinstance(value, str) or not value:
        raise wrong(at, value, allowed)
    return _bounded(at, value)


def _schema(at: str, value: Any) -> str:
    if isinstance(value, dict):
        return encoded(at, value)
    return _text(at, value, "it must be a JSON schema: an object, or its text")


def _tag(at: str, value: Any) -> str:
    if isinstance(value, dict):
        _only(at, value, TYPES["structural_tag"])
        _check_tag(at, value)
        return encoded(at, value)
    return _text(at, value, "it must be an object with structures and triggers, or its text")


def _choice(at: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise wrong(at, value, "it must be a list with at least one string")
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{at} has {len(value)} strings; at most {MAX_CHOICES}", param=at)
    if not all(value):
        raise wrong(at, value, "none of its strings may be empty")
    _bounded(at, "".join(value))
    return tuple(value)


_READERS: Mapping[Kind, Callable[[str, Any], str | tuple[str, ...]]] = {
    "json": _schema,
    "json_object": _true,
    "regex": _text,
    "choice": _choice,
    "grammar": _text,
    "structural_tag": _tag,
}


def _check_tag(at: str, given: Mapping[str, Any]) -> None:
    for name, kind, what in (("structures", dict, "objects"), ("triggers", str, "strings")):
        value = given.get(name, MISSING)
        if not isinstance(value, list) or not value or not all(isinstance(x, kind) for x in value):
            raise wrong(
                f"{at}.{name}",
                value,
                f"it must be a list of {what} with at least one element",
            )
        if len(value) > MAX_STRUCTURES:
            message = f"{at}.{name} has {len(value)} {what}; at most {MAX_STRUCTURES}"
            raise InvalidRequest(message, param=f"{at}.{name}")
        if not all(one or kind is dict for one in value):
            raise wrong(f"{at}.{name}", value, "none of its strings may be empty")


def object_at(at: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(at, value, "it must be an object")
    return value


def _only(at: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    for name, value in given.items():
        if name not in names and value is not None:
            param = f"{at}.{name[:SHOWN]}"
            raise InvalidRequest(
                f"{param} is {show(value)}, and {at} does not have this field here; its fields are"
                f" {', '.join(names)}",
                param=param,
                code="unknown_parameter",
            )


def encoded(at: str, value: Mapping[str, Any]) -> str:
    try:
        return _bounded(at, msgspec.json.encode(value).decode())
    except RecursionError:
        raise InvalidRequest(f"{at} is nested too deep", param=at) from None


def _bounded(at: str, text: str) -> str:
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{at} has {size} bytes; at most {MAX_GRAMMAR_BYTES}", param=at)
    return text


# --- schemas for the API document ---------------------------------------------------------------


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}


def _object_with(members: Members, required: Mapping[str, Schema], **more: Schema) -> Schema:
    properties = {
        name: {"description": members.fields[name].plain_remark} | dict(schema)
        for name, schema in (dict(required) | more).items()
    }
    return {"type": "object", "properties": properties, "required": list(required), **NOTHING_ELSE}


_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}
_ANY_OBJECT: Schema = {"type": "object"}
_TAG_PARTS: Mapping[str, Schema] = {
    "structures": {
        "type": "array",
        "items": _ANY_OBJECT,
        "minItems": 1,
        "maxItems": MAX_STRUCTURES,
    },
    "triggers": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "minItems": 1,
        "maxItems": MAX_STRUCTURES,
    },
}
_TAG: Schema = {
    "type": "object",
    "properties": dict(_TAG_PARTS),
    "required": list(_TAG_PARTS),
    **NOTHING_ELSE,
}
_VALUES: Mapping[Kind, Schema] = {
    "json": {"anyOf": [_ANY_OBJECT, _STRING]},
    "json_object": {"enum": [True]},
    "regex": _STRING,
    "choice": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "minItems": 1,
        "maxItems": MAX_CHOICES,
    },
    "grammar": _STRING,
    "structural_tag": {"anyOf": [_TAG, _STRING]},
}
_PARTS: Mapping[str, Schema] = {
    _JSON_SCHEMA: _object_with(
        MEMBERS["chat", f"{FORMAT}.{_JSON_SCHEMA}"],
        {"schema": _ANY_OBJECT},
        name={"type": ["string", "null"]},
        description={"type": ["string", "null"]},
        strict={"type": ["boolean", "null"]},
    ),
    **_TAG_PARTS,
}
_FORMAT_SCHEMA: Schema = {
    "anyOf": [
        *(
            _object_with(
                MEMBERS["chat", FORMAT],
                {"type": {"enum": [kind]}} | {part: _PARTS[part] for part in parts},
            )
            for kind, parts in TYPES.items()
        ),
        {"type": "null"},
    ]
}
_UNUSED: Schema = {"enum": [None, False]}
_OUTPUTS_SCHEMA: Schema = {
    "anyOf": [
        *(
            _object_with(
                MEMBERS["chat", OUTPUTS],
                {kind: _VALUES[kind]},
                disable_fallback={"type": ["boolean", "null"]},
                disable_any_whitespace=_UNUSED,
                disable_additional_properties=_UNUSED,
                whitespace_pattern=_UNUSED,
            )
            for kind in KINDS
        ),
        {"type": "null"},
    ]
}
