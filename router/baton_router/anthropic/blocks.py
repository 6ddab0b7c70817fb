"""Reads the conversation of a Messages body: messages whose content is made of typed blocks.

In: `messages` and `system`. Out: messages for the model's chat template. A tool's result becomes a
message of its own, calls and thinking become members of the assistant's message. Members of a block
that the tables lack are left out, as a client sends back what it or another server added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.errors import MISSING, wrong
from baton_router.openai.fields.kinds import (
    ANYTHING,
    Json,
    Schema,
    ValueKind,
    choice,
    mapping,
    object_at,
    only,
    text,
)
from baton_router.openai.fields.table import (
    FieldTable,
    flag,
    ignored,
    optional,
    read_fields,
    read_values,
    required,
    schema_of,
)
from baton_router.openai.fields.unserved import CACHED
from baton_router.openai.tools import template_call

TEXT, THINKING, REDACTED = "text", "thinking", "redacted_thinking"
CALL, RESULT = "tool_use", "tool_result"
# The members that a block of each type needs.
NEEDED: Mapping[str, Sequence[str]] = {
    TEXT: ("text",),
    THINKING: ("thinking",),
    REDACTED: (),
    CALL: ("id", "name", "input"),
    RESULT: ("tool_use_id",),
}
# The types of blocks that messages of each role hold.
HELD: Mapping[str, Sequence[str]] = {
    "user": (TEXT, RESULT),
    "assistant": (TEXT, THINKING, REDACTED, CALL),
    "system": (TEXT,),
}
BETWEEN = "\n"  # between the texts of blocks that the client wrote; the model's follow each other
FAILED = "Error: "  # before the result of a call that failed: templates have no other place for it
_TEXT_ONLY = "the model reads text only"
_STRING = text()


class TextFields(FieldTable, open=True):
    """The members of a block of text."""

    type = required(only((TEXT,), f"it must be {TEXT}: {_TEXT_ONLY}"), "only `text`")
    text = required(_STRING, "the text")
    cache_control = ignored(ANYTHING, CACHED)
    citations = ignored(ANYTHING, "templates do not show them")


def _read_text(at: str, value: Any) -> str:
    """The text of a string, or of a list of blocks of text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(at, value, "it must be a string or a list of blocks of text")
    blocks = [
        read_fields(TextFields, object_at(f"{at}[{position}]", block), f"{at}[{position}]")
        for position, block in enumerate(value)
    ]
    return BETWEEN.join(block.text for block in blocks)


_TEXTS: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": schema_of(TextFields)}],
}
SYSTEM = ValueKind(_read_text, _TEXTS, TextFields, listed=True)


class BlockFields(FieldTable, open=True):
    """The members of all types of blocks."""

    type = required(
        choice(*NEEDED),
        "`text`; of a user also `tool_result`, of the assistant also `tool_use`, `thinking` and"
        " `redacted_thinking`",
    )
    text = optional(_STRING, "of a block of type `text`")
    thinking = optional(_STRING, "of type `thinking`: passed to the model's template as reasoning")
    signature = ignored(ANYTHING, "thinking is taken from any server")
    data = ignored(ANYTHING, "only the server that made it can read `redacted_thinking`")
    id = optional(_STRING, "of type `tool_use`: the call's id")
    name = optional(_STRING, "of type `tool_use`: the tool's name")
    input = optional(mapping(), "of type `tool_use`: the call's arguments")
    tool_use_id = optional(_STRING, "of type `tool_result`: the id of the call")
    content = optional(
        ValueKind(_read_text, _TEXTS),
        "of type `tool_result`: the result, a text or blocks of text",
        "empty",
    )
    is_error = flag(False, f"of type `tool_result`: the text gets `{FAILED.strip()}` before it")
    caller = ignored(ANYTHING, "the model is the only caller")
    cache_control = TextFields.cache_control
    citations = TextFields.citations


class MessageFields(FieldTable, open=True):
    """The members of each of `messages`."""

    role = required(choice(*HELD), "`user`, `assistant`, or `system` for an instruction in between")
    content = required(ValueKind(ANYTHING.read, {}, BlockFields, listed=True), "a text, or blocks")


def _block_schema(kind: str) -> Json:
    members = {name: BlockFields.FIELDS[name].kind.schema for name in NEEDED[kind]}
    return {"properties": {"type": {"enum": [kind]}, **members}, "required": ["type", *members]}


def _message_schema(role: str, held: Sequence[str]) -> Json:
    kinds = [_block_schema(kind) for kind in held]
    block = schema_of(BlockFields) | {"anyOf" if len(kinds) > 1 else "allOf": kinds}
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": block}]}
    return {
        "properties": {"role": {"enum": [role]}, "content": content},
        "required": ["role", "content"],
    }


def _read_messages(at: str, value: Any) -> list[Json]:
    """The messages for the template. Raise InvalidRequest that names the first wrong member."""
    if not isinstance(value, list) or not value:
        raise wrong(at, value, "it must be a list of at least one message")
    shown: list[Json] = []
    for position, message in enumerate(value):
        shown += _read_message(f"{at}[{position}]", message)
    if shown[-1].get("tool_calls"):
        raise InvalidRequest(
            f"{at} ends with calls; answer each with a block of type {RESULT} in a user's message",
            param=at,
        )
    return shown


MESSAGES = ValueKind(
    _read_messages,
    {
        "type": "array",
        "minItems": 1,
        "items": {
            **schema_of(MessageFields),
            "anyOf": [_message_schema(role, held) for role, held in HELD.items()],
        },
    },
    MessageFields,
    listed=True,
)


def _read_message(at: str, message: Any) -> list[Json]:
    fields = read_fields(MessageFields, object_at(at, message), at)
    role, value = fields.role, fields.content
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise wrong(f"{at}.content", value, "it must be a string or a list of blocks")
    blocks = [
        _read_block(f"{at}.content[{position}]", block, role)
        for position, block in enumerate(value)
    ]
    if role == "assistant":
        return [_assistant_message(blocks)]
    return _other_messages(role, blocks)


def _read_block(at: str, value: Any, role: str) -> BlockFields:
    given = object_at(at, value)
    kind, held = given.get("type", MISSING), HELD[role]
    if kind not in held:
        allowed = f"{_TEXT_ONLY}; a message of role {role} holds blocks of type {', '.join(held)}"
        raise wrong(f"{at}.type", kind, allowed)
    for name in NEEDED[kind]:
        if given.get(name) is None:
            member = given.get(name, MISSING)
            raise wrong(f"{at}.{name}", member, f"a block of type {kind} needs it")
    block = read_values(BlockFields, given, at)
    if kind == CALL:
        _check_depth(f"{at}.input", given["input"])
    return block


def _check_depth(at: str, arguments: Json) -> None:
    try:
        msgspec.json.encode(arguments)
    except RecursionError:
        raise InvalidRequest(f"{at} is nested too deep", param=at) from None


def _assistant_message(blocks: Sequence[BlockFields]) -> Json:
    message: Json = {
        "role": "assistant",
        "content": "".join(block.text or "" for block in blocks if block.type == TEXT),
    }
    thoughts = [block.thinking for block in blocks if block.type == THINKING and block.thinking]
    if thoughts:
        message["reasoning_content"] = BETWEEN.join(thoughts)
    calls = [block for block in blocks if block.type == CALL]
    if calls:  # templates take an empty list for calls
        message["tool_calls"] = [
            template_call({"id": call.id, "function": {"name": call.name, "arguments": call.input}})
            for call in calls
        ]
    return message


def _other_messages(role: str, blocks: Sequence[BlockFields]) -> list[Json]:
    """A message for each result of a call, and one for each run of texts."""
    messages: list[Json] = []
    texts: list[str] = []
    for block in blocks:
        if block.type == TEXT:
            texts.append(block.text or "")
            continue
        if texts:
            messages.append({"role": role, "content": BETWEEN.join(texts)})
            texts = []
        result = (FAILED if block.is_error else "") + (block.content or "")
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
    if texts or not messages:
        messages.append({"role": role, "content": BETWEEN.join(texts)})
    return messages
