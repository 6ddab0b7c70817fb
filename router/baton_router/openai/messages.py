"""Reads the messages of a chat.

In: `messages` of a body. Out: each message with its content as one text, and only the members that
the model's template may see. What a client got back, from this server or another, it may send
again: other members of a message, a part or a call are left out.
"""

from __future__ import annotations

from typing import Any

from baton_router.openai.fields.errors import MISSING, show, wrong
from baton_router.openai.fields.kinds import ANYTHING, Json, ValueKind, nullable
from baton_router.openai.fields.table import (
    Field,
    FieldTable,
    check_names,
    ignored,
    obeyed_members,
    optional,
    refused,
    schema_of,
)
from baton_router.openai.fields.unserved import CACHED, TEXT_ONLY
from baton_router.openai.tools import CALLS_SCHEMA, check_calls, template_call

# Type of a part -> its member with the text.
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Parts of an assistant's reasoning; clients and servers name their text differently.
REASONING = ("thinking", "reasoning", "redacted_thinking")
_THOUGHTS = ("thinking", "reasoning", "text", "summary", "content")
_REASONING_MEMBERS = ("reasoning_content", "reasoning", "thinking")

_KIND_OF_PART = "`text`, `refusal`, or reasoning ([below](#what-a-client-may-send-back))"


class PartFields(FieldTable, open=True):
    """The members of each part of a message's content."""

    type = optional(ANYTHING, _KIND_OF_PART)
    text = optional(ANYTHING, "the part's text")
    refusal = optional(ANYTHING, "the text of a part of type `refusal`")
    cache_control = ignored(ANYTHING, CACHED)
    prompt_cache_breakpoint = ignored(ANYTHING, CACHED)


_PART = {
    **schema_of(PartFields),
    "anyOf": [
        *(
            {
                "properties": {"type": {"const": kind}, name: {"type": "string"}},
                "required": ["type", name],
            }
            for kind, name in TEXTS.items()
        ),
        {"properties": {"type": {"enum": list(REASONING)}}, "required": ["type"]},
    ],
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


def _passed_on() -> Field[Any]:
    return optional(ANYTHING, "passed to the model's template unchanged")


class MessageFields(FieldTable, open=True):
    """The members of each of `messages`. The functions below check their values."""

    role = optional(
        ANYTHING,
        "`system`, `developer`, `user`, `assistant`, or another role of the template"
        " ([below](#roles))",
    )
    content = optional(
        ValueKind(ANYTHING.read, {}, PartFields, listed=True),
        "a text, or parts whose texts are joined by newlines",
    )
    cache_control = ignored(ANYTHING, CACHED)
    name = _passed_on()
    tool_call_id = _passed_on()
    function_call = _passed_on()
    reasoning_content = _passed_on()
    reasoning = _passed_on()
    thinking = _passed_on()
    tool_plan = _passed_on()
    refusal = _passed_on()
    annotations = _passed_on()
    prefix = refused("use `continue_final_message`")
    partial = refused("use `continue_final_message`")
    audio = refused(TEXT_ONLY)
    images = refused(TEXT_ONLY)
    videos = refused(TEXT_ONLY)
    files = refused(TEXT_ONLY)
    tool_calls = optional(
        ValueKind(ANYTHING.read, CALLS_SCHEMA),
        "the calls of an assistant's message; the template receives their arguments as an object"
        " ([more](tools.md#answering-a-call))",
    )


_MESSAGE = {
    **schema_of(MessageFields),
    "anyOf": [
        {
            "properties": {"role": {"type": "string"}, "content": _CONTENT},
            "required": ["role", "content"],
        },
        {
            "properties": {"role": {"const": "assistant"}, "content": nullable(_CONTENT)},
            "required": ["role"],
        },
    ],
}


def _read_messages(at: str, value: Any) -> list[Json]:
    """The messages for the template. Raise InvalidRequest that names the first wrong member."""
    if not isinstance(value, list) or not value:
        raise wrong(at, value, "it must be a list of at least one message")
    return [_read_message(f"{at}[{position}]", message) for position, message in enumerate(value)]


MESSAGES = ValueKind(
    _read_messages, {"type": "array", "minItems": 1, "items": _MESSAGE}, MessageFields, listed=True
)


def _read_message(name: str, message: Any) -> Json:
    if not isinstance(message, dict):
        raise wrong(name, message, "it must be an object with role and content")
    check_names(MessageFields, message, name)
    if not isinstance(message.get("role"), str):
        raise wrong(f"{name}.role", message.get("role", MISSING), "it must be a string")
    members = obeyed_members(MessageFields, message)
    for member in _REASONING_MEMBERS:  # other servers' may be objects, which no template takes
        if not isinstance(members.get(member), str):
            members.pop(member, None)
    calls = members.pop("tool_calls", None)
    check_calls(f"{name}.tool_calls", calls)
    if calls:  # templates take an empty list for calls
        members["tool_calls"] = [template_call(call) for call in calls]
    return members | _content_members(f"{name}.content", members)


def _content_members(at: str, message: Json) -> Json:
    """The members that a message's content gives: its text, and an assistant's reasoning."""
    value, by_assistant = message.get("content"), message["role"] == "assistant"
    thoughts: list[str] = []
    if isinstance(value, str):
        text = value
    elif value is None and by_assistant:
        text = ""
    elif isinstance(value, list):
        texts, thoughts = _read_parts(at, value)
        text = "\n".join(texts)
    else:
        given = message.get("content", MISSING)
        raise wrong(at, given, "it must be a string or a list of text parts")
    refusal = message.get("refusal")
    if by_assistant and not text and isinstance(refusal, str):
        text = refusal  # what the assistant answered
    members: Json = {"content": text}
    if thoughts and by_assistant and not any(map(message.get, _REASONING_MEMBERS)):
        members["reasoning_content"] = "\n".join(thoughts)
    return members


def _read_parts(at: str, parts: list[Any]) -> tuple[list[str], list[str]]:
    """The texts of text parts, and those of reasoning parts."""
    texts, thoughts = [], []
    for position, part in enumerate(parts):
        path = f"{at}[{position}]"
        if not isinstance(part, dict):
            raise wrong(path, part, "it must be an object with type and text")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in (*TEXTS, *REASONING):
            raise wrong(path, part, f"the model reads text only, not parts of type {show(kind)}")
        if kind in REASONING:
            thoughts += _thoughts(part)
            continue
        text = part.get(TEXTS[kind], MISSING)
        if not isinstance(text, str):
            raise wrong(f"{path}.{TEXTS[kind]}", text, "it must be a string")
        texts.append(text)
    return texts, thoughts


def _thoughts(part: Json) -> list[str]:
    """The texts of a reasoning part; none if they are encrypted or in an unknown form."""
    for name in _THOUGHTS:
        value = part.get(name)
        pieces = value if isinstance(value, list) else [{"text": value}]
        given = [piece.get("text") for piece in pieces if isinstance(piece, dict)]
        texts = [text for text in given if isinstance(text, str) and text]
        if texts:
            return texts
    return []
