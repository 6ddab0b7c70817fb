"""Fields that the router does not act on: those it refuses by name, and those it reads past.

A field that would change the answer is refused unless its value asks for nothing. One that changes
nothing (`user`, `metadata`, `store`, ...) is accepted, under OpenAI's rules for its value. Which
these are, and why, stands in `request_fields`.
"""

from __future__ import annotations

from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import MAX_CHOICES
from baton_router.openai.body_reader import Fields, wrong
from baton_router.openai.request_fields import MEMBERS, Body, Field

MAX_METADATA = 16
_METADATA = {"additionalProperties": {"type": "string"}, "maxProperties": MAX_METADATA}
# Fields that are ignored; what they hold is checked all the same.
_TEXTS = (
    *("user", "safety_identifier", "session_id"),
    *("prompt_cache_key", "prompt_cache_retention", "mm_payload"),
)
_OBJECTS = ("prompt_cache_options", "media_io_kwargs", "mm_processor_kwargs")
_LIMITED = {
    body: {field.name: field for field in members.fields.values() if field.accepts is not None}
    for (body, path), members in MEMBERS.items()
    if not path
}


def check_unserved(fields: Fields, body: Body) -> None:
    """Raise InvalidRequest naming the first field that is unknown, that asks for what we do not do,
    or that breaks OpenAI's rules for it."""
    fields.only(MEMBERS[body, ""])
    limited = _LIMITED[body]
    if fields.given(limited):
        for field in limited.values():
            only_accepted(fields, field)
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    fields.rule({"description": "best_of is what n is"})
    if best_of is not None and best_of != n:
        raise wrong("best_of", best_of, f"this server supports n only, which is {n}; leave it out")
    _check_ignored(fields)


def only_accepted(fields: Fields, field: Field) -> None:
    """Raise InvalidRequest where a field has another value than those that pass."""
    accepted = field.accepts or ()
    name = field.name.rpartition(".")[2]
    value = fields.raw(name, {"enum": [None, *accepted]})
    if value is not None and not any(_same(value, one) for one in accepted):
        raise wrong(field.name, value, field.complaint)


def _same(value: Any, other: Any) -> bool:
    """As JSON has it: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _check_ignored(fields: Fields) -> None:
    for name in _TEXTS:
        fields.text(name)
    for name in _OBJECTS:
        fields.mapping(name)
    fields.boolean("store", False)
    fields.boolean("parallel_tool_calls", True)
    fields.integer("stream_interval", 1)
    pairs = fields.mapping("metadata", _METADATA) or {}
    if len(pairs) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata holds {len(pairs)} pairs; at most {MAX_METADATA}", param="metadata"
        )
    for name, value in pairs.items():
        if not isinstance(value, str):
            raise wrong("metadata", {name: value}, "each value must be a string")
